"""One rank that trains on a GPU over NCCL, or on a CPU over Gloo: `python nccl_rank.py RANK RANKS FOLDER DEVICE`.

Several NCCL ranks can share one GPU when each says that it is another host and they talk over the loopback.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise
from shardwise import Plan
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan.placement import STRATEGIES, Mesh

SHAPE = GPTShape(num_layers=3, width=96, num_heads=3, vocab_size=101, max_seq=32)


PLANS = {
    **{
        f"{strategy} {precision}": Plan(strategy=strategy, precision=precision, prefetch=2)
        for strategy in STRATEGIES
        for precision in ("fp32", "bf16")
    },
    "full recompute fp32": Plan(recompute="full"),
    "selective recompute fp32": Plan(recompute="selective"),
    "offloaded activations fp32": Plan(offload_activations=True),
    "offloaded states fp32": Plan(offload_states=True),
    "offloaded states bf16": Plan(offload_states=True, precision="bf16"),
    "offloaded states of zero2 fp32": Plan(strategy="zero2", offload_states=True),
    "ring of ddp fp32": Plan(strategy="ddp", collectives="ring"),
    "ring fp32": Plan(collectives="ring"),
    "dynamic fp32": Plan(dynamic=True),
    "kept norms bf16": Plan(precision="bf16", keep_fp32=("*norm*",)),
}
# Two groups of two.
HYBRID_PLANS = {
    f"hybrid {strategy} {precision}": Plan(strategy=strategy, precision=precision, mesh=Mesh(replicate=2, shard=2))
    for strategy in ("zero2", "shard_grad_op", "fsdp")
    for precision in ("fp32", "bf16")
}


def losses(plan: Plan, *, rank: int, num_ranks: int, device: str) -> list[float]:
    torch.manual_seed(0)
    model = build_model(SHAPE, device="cpu").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shardwise.prepare(model, optimizer, plan)
    found = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step * num_ranks + rank)
        tokens = torch.randint(SHAPE.vocab_size, (4, 33), generator=generator).to(device)
        # Two passes in a step, which must give what one does.
        passes = (tokens[:2], tokens[2:]) if step % 2 else (tokens,)
        loss = torch.zeros((), device=device)
        for number, part in enumerate(passes):
            with shardwise.accumulate(model, enabled=number + 1 < len(passes)):
                part_loss = cross_entropy(model, (part[:, :-1], part[:, 1:])) / len(passes)
                part_loss.backward()
            loss += part_loss.detach()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        found.append(mean.item() / num_ranks)
    return found


def overflow(*, rank: int, num_ranks: int, device: str) -> list[float]:
    """fp16: the last rank's gradient overflows in step 1. The scale after each step, and the number of steps taken."""
    torch.manual_seed(0)
    model = build_model(SHAPE, device="cpu").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    shardwise.prepare(model, optimizer, Plan(strategy="fsdp", precision="fp16"))
    scaler = shardwise.GradScaler(device, init_scale=2.0**10)
    told = []
    for step in range(3):
        tokens = torch.randint(SHAPE.vocab_size, (2, 33), generator=torch.Generator().manual_seed(step)).to(device)
        loss = cross_entropy(model, (tokens[:, :-1], tokens[:, 1:]))
        planted = step == 1 and rank == num_ranks - 1
        scaler.scale(loss * 1e30 if planted else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(scaler.get_scale())
    told.append(max(float(state["step"]) for state in optimizer.state.values()))
    everyone = [None] * num_ranks
    dist.all_gather_object(everyone, told)
    assert all(other == told for other in everyone), everyone
    return told


def batch_norm(plan: Plan, *, rank: int, num_ranks: int) -> list[float]:
    """SyncBatchNorm: the norm of the gradients, and the statistics, against those of one process with the whole batch."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten())
    plain = plain.append(torch.nn.Linear(4 * 6 * 6, 3)).cuda()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    shardwise.prepare(model, None, plan)
    images = torch.randn(2 * num_ranks, 1, 8, 8, device="cuda")
    model(images[2 * rank : 2 * rank + 2]).square().mean().backward()
    norm = shardwise.clip_grad_norm_(model, 1e9)
    plain(images).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    statistics = (model[1].running_var - plain[1].running_var).abs().max()
    return [norm.item() / expected.item(), statistics.item()]


def main() -> None:
    rank, num_ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / f"store-{device}-{num_ranks}"), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    plans = PLANS | (HYBRID_PLANS if num_ranks == 4 else {})
    results = {name: losses(plan, rank=rank, num_ranks=num_ranks, device=device) for name, plan in plans.items()}
    results["overflow"] = overflow(rank=rank, num_ranks=num_ranks, device=device)
    if device == "cuda":
        for strategy in STRATEGIES:
            results[f"batch norm {strategy}"] = batch_norm(Plan(strategy=strategy), rank=rank, num_ranks=num_ranks)
    if rank == 0:
        (folder / f"losses-{device}-{num_ranks}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
