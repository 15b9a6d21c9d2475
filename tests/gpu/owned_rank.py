"""One rank of two that train against one process: `python owned_rank.py RANK RANKS FOLDER DEVICE`.

Muon, whose matrices are OWNED, in fp32 and in fp16; `replan` between two steps; adapters on a quantised base. Each rank
also trains alone, by the micro-batches of all ranks, with the same kernels. Leaves, for each rank, name → what was found wrong ("" if nothing).
Over NCCL ranks share one GPU; over Gloo, on a CPU, the same cases can be tried without one.
"""

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graph_cases import deterministic
from quantised import WIDTH, QuantisedNet
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

import shardwise
from shardwise import Plan
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy

SHAPE = GPTShape(num_layers=3, width=96, num_heads=3, vocab_size=128, max_seq=32)
NUM_STEPS = 5
Weights = dict[str, Tensor]


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


def gpt_loss(model: Any, step: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(SHAPE.vocab_size, (4, SHAPE.max_seq + 1), generator=generator).to(device)
    return cross_entropy(model, (tokens[:, :-1], tokens[:, 1:]))


def overflowing_loss(model: Any, step: int, rank: int, device: str) -> Tensor:
    """Rank 1's gradients are more than fp16 holds in step 2, which all ranks skip."""
    return gpt_loss(model, step, rank, device) * (1e30 if (step, rank) == (2, 1) else 1.0)


def quantised() -> nn.Module:
    return QuantisedNet("bitsandbytes nf4")


def quantised_loss(model: Any, step: int, rank: int, device: str) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(device)).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """`half`: fp32 weights, computed with in fp16, and scaled gradients."""

    make: Callable[[], nn.Module] = gpt
    loss: Callable[[Any, int, int, str], Tensor] = gpt_loss
    optimizers: Callable[[nn.Module], list[Optimizer]]
    half: bool = False


def update(made: list[Optimizer], scaler: torch.amp.GradScaler) -> None:
    for optimizer in made:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in made:
        optimizer.zero_grad()


def alone(training: Training, *, num_ranks: int, device: str) -> Weights:
    """One process: the ranks' gradients in their order, their sum × 1/W."""
    torch.manual_seed(0)
    model = training.make().to(device)
    made = training.optimizers(model)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=training.half)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step in range(NUM_STEPS):
        sums: Weights = {}
        for rank in range(num_ranks):
            model.zero_grad()
            called: Any = model
            if training.half:
                called = partial(functional_call, model, {name: p.half() for name, p in named.items()})
            scaler.scale(training.loss(called, step, rank, device)).backward()
            for name, p in named.items():
                sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
        for name, p in named.items():
            p.grad = sums[name] * (1 / num_ranks)
        update(made, scaler)
    return {name: p.detach().clone() for name, p in named.items()}


def together(training: Training, *, plans: list[Plan], rank: int, device: str) -> Weights:
    """This job's ranks, under one plan in each step."""
    # Rank 0's values are the ones that count.
    torch.manual_seed(rank)
    model = training.make().to(device)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    made = training.optimizers(model)
    with warnings.catch_warnings():
        # That matrices are OWNED.
        warnings.simplefilter("ignore")
        shardwise.prepare(model, made, plans[0])
    scaler = shardwise.GradScaler(device, init_scale=2.0**10, enabled=training.half)
    for step, plan in enumerate(plans):
        if plan != plans[max(step - 1, 0)]:
            shardwise.replan(model, plan)
        scaler.scale(training.loss(model, step, rank, device)).backward()
        update(made, scaler)
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
    """Name of a case → what is wrong in it."""

    def compared(training: Training, *strategies: str) -> str:
        expected = alone(training, num_ranks=num_ranks, device=device)
        precision = "fp16" if training.half else "fp32"
        plans = [Plan(strategy=strategy, precision=precision, capture="off") for strategy in strategies]
        return wrong(together(training, plans=plans, rank=rank, device=device), expected)

    found = {}
    for strategy in ("zero1", "zero2", "fsdp"):
        found[f"muon {strategy}"] = compared(Training(optimizers=muon), *[strategy] * NUM_STEPS)
        scaled = Training(optimizers=muon, loss=overflowing_loss, half=True)
        found[f"scaled muon {strategy}"] = compared(scaled, *[strategy] * NUM_STEPS)
    found["replan"] = compared(Training(optimizers=adamw), "fsdp", "fsdp", "zero2", "zero2", "fsdp")
    if importlib.util.find_spec("bitsandbytes") is not None:
        adapters = Training(make=quantised, loss=quantised_loss, optimizers=adamw)
        found["quantised"] = compared(adapters, *["fsdp"] * NUM_STEPS)
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
