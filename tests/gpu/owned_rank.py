"""One rank of two that train against one process: `python owned_rank.py RANK RANKS FOLDER DEVICE`.

Muon, whose matrices are OWNED; `replan` between two steps; adapters on a quantised base. Each rank also trains alone, by
the micro-batches of all ranks, with the same kernels. Leaves, for each rank, name → what was found wrong ("" if nothing).
Over NCCL ranks share one GPU; over Gloo, on a CPU, the same cases can be tried without one.
"""

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from capture_cases import deterministic
from quantised import WIDTH, QuantisedNet
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise
from shardwise import Plan
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.tasks import cross_entropy

SHAPE = GPTShape(num_layers=3, width=96, num_heads=3, vocab_size=128, max_seq=32)
NUM_STEPS = 5
Weights = dict[str, Tensor]
Made = Callable[[nn.Module], list[Optimizer]]
Loss = Callable[[nn.Module, int, int, str], Tensor]


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of blocks, AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "blocks." in name]
    others = [p for name, p in named if p.dim() != 2 or "blocks." not in name]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=1e-2)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)]


def gpt() -> nn.Module:
    return build_model(SHAPE, device="cpu")


def gpt_loss(model: nn.Module, step: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(SHAPE.vocab_size, (4, SHAPE.max_seq + 1), generator=generator).to(device)
    return cross_entropy(model, (tokens[:, :-1], tokens[:, 1:]))


def quantised() -> nn.Module:
    return QuantisedNet("bitsandbytes nf4")


def quantised_loss(model: nn.Module, step: int, rank: int, device: str) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(device)).square().mean()


def alone(make: Callable[[], nn.Module], loss: Loss, optimizers: Made, *, num_ranks: int, device: str) -> Weights:
    """One process: the ranks' gradients in their order, their sum × 1/W."""
    torch.manual_seed(0)
    model = make().to(device)
    made = optimizers(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(NUM_STEPS):
        sums: list[Tensor] = []
        for rank in range(num_ranks):
            model.zero_grad()
            loss(model, step, rank, device).backward()
            grads = [p.grad.clone() for p in trained]
            sums = [one + other for one, other in zip(sums, grads, strict=True)] if sums else grads
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = total * (1 / num_ranks)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def together(
    make: Callable[[], nn.Module], loss: Loss, optimizers: Made, *, plans: list[Plan], rank: int, device: str
) -> Weights:
    """This job's ranks, under one plan in each step."""
    # Rank 0's values are the ones that count.
    torch.manual_seed(rank)
    model = make().to(device)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    made = optimizers(model)
    with warnings.catch_warnings():
        # That matrices are OWNED.
        warnings.simplefilter("ignore")
        shardwise.prepare(model, made, plans[0])
    for step, plan in enumerate(plans):
        if plan != plans[max(step - 1, 0)]:
            shardwise.replan(model, plan)
        loss(model, step, rank, device).backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    return {name: state[name].detach().clone() for name in names}


def wrong(found: Weights, expected: Weights) -> str:
    """The parameters that differ in any bit, and by how much of their largest value."""
    lines = [
        f"{name}: {((found[name] - value).abs().max() / value.abs().max()).item():.2e}"
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    ]
    return ", ".join(lines)


def cases(*, rank: int, num_ranks: int, device: str) -> dict[str, str]:
    found = {}
    expected = alone(gpt, gpt_loss, muon, num_ranks=num_ranks, device=device)
    for strategy in ("zero1", "zero2", "fsdp"):
        plans = [Plan(strategy=strategy, capture="off")] * NUM_STEPS
        found[f"muon {strategy}"] = wrong(
            together(gpt, gpt_loss, muon, plans=plans, rank=rank, device=device), expected
        )
    expected = alone(gpt, gpt_loss, adamw, num_ranks=num_ranks, device=device)
    plans = [Plan(strategy=strategy, capture="off") for strategy in ("fsdp", "fsdp", "zero2", "zero2", "fsdp")]
    found["replan"] = wrong(together(gpt, gpt_loss, adamw, plans=plans, rank=rank, device=device), expected)
    if importlib.util.find_spec("bitsandbytes") is not None:
        expected = alone(quantised, quantised_loss, adamw, num_ranks=num_ranks, device=device)
        plans = [Plan(strategy="fsdp", capture="off")] * NUM_STEPS
        found["quantised"] = wrong(
            together(quantised, quantised_loss, adamw, plans=plans, rank=rank, device=device), expected
        )
    return found


def main() -> None:
    rank, num_ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    with deterministic():
        found = cases(rank=rank, num_ranks=num_ranks, device=device)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
