"""One rank of several that share a GPU: `python capture_rank.py RANK RANKS FOLDER`. Captured against ordinary steps.

Leaves, on rank 0, name → what was found wrong ("" if nothing).
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_cases import Masked, Ran, gpt_batch, masked_batch, masked_loss, run
from torch import Tensor, nn

from shardwise import Plan
from shardwise.comm.agreement import RanksDisagree
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import STRATEGIES


def compared(name: str, *, least_replayed: int, plan: dict[str, Any], **how: Any) -> str:
    """What is wrong, if captured steps did not give what ordinary ones did, or too few of them were replayed.

    Under `on`, which does not ask whether it pays: on a GPU that ranks share, that is chance.
    """
    captured, ordinary = (run(Plan(capture=capture, **plan), **how) for capture in ("on", "off"))
    if not captured.same_as(ordinary):
        return f"{name} differs: {_first_difference(captured, ordinary)}"
    if sum(captured.replayed) < least_replayed:
        return f"{name}: only {sum(captured.replayed)} steps were replayed; {captured.lines}"
    return ""


def _first_difference(one: Ran, other: Ran) -> str:
    steps = [number for number, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)) if a != b]
    return f"losses from step {steps[0]}" if steps else "weights"


class OnOneRank(nn.Linear):
    """Rank 1 alone reads a number."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            x.sum().item()
        return super().forward(x)


def main() -> None:
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks, device_id=torch.device("cuda", 0))
    found = {}
    for strategy in STRATEGIES:
        found[strategy] = compared(
            strategy,
            least_replayed=40,
            plan={"strategy": strategy, "precision": "bf16"},
            batch=partial(gpt_batch, rank=rank),
            steps=50,
        )
        print(rank, strategy, found[strategy] or "equal", flush=True)
    # Batches are padded on the last rank alone, and in one step all differ in size between the ranks.
    for strategy in ("ddp", "fsdp"):
        found[f"guarded {strategy}"] = compared(
            f"guarded {strategy}",
            least_replayed=20,
            plan={"strategy": strategy},
            make_model=Masked,
            loss=masked_loss,
            batch=lambda step: masked_batch(
                step, padded=lambda step: step in (9, 14, 15, 20) and rank == num_ranks - 1, rank=rank
            ),
            steps=30,
        )
        print(rank, strategy, found[f"guarded {strategy}"] or "equal", flush=True)
    found["sizes"] = compared(
        "sizes",
        least_replayed=8,
        plan={"strategy": "zero2"},
        batch=lambda step: gpt_batch(step, size=2 if step == 9 and rank == 0 else 4, rank=rank),
        steps=16,
    )
    found["refused"] = _refused(rank)
    found["rates"] = _rates(rank)
    if num_ranks == 4:
        found["hybrid"] = compared(
            "hybrid",
            least_replayed=8,
            plan={"mesh": Mesh(replicate=2, shard=2)},
            batch=partial(gpt_batch, rank=rank),
            steps=16,
        )
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    # Graphs are still alive here.
    dist.destroy_process_group()
    print(rank, "ended", flush=True)


def _refused(rank: int) -> str:
    """What one rank cannot capture, none does."""
    ran = run(
        Plan(strategy="ddp", capture="auto"),
        make_model=lambda: OnOneRank(64, 64),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda step: torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda(),
        steps=8,
    )
    if any(ran.replayed):
        return "a step was replayed"
    told = rank != 0 or (len(ran.lines) == 1 and "rank 1" in ran.lines[0] and "x.sum().item()" in ran.lines[0])
    return "" if told else f"told {ran.lines}"


def _rates(rank: int) -> str:
    """A rate that a scheduler halves on one rank alone is found between replays."""

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 15 and rank == 1:
            optimizer.param_groups[0]["lr"].mul_(0.5)

    try:
        run(Plan(strategy="fsdp", capture="on"), batch=partial(gpt_batch, rank=rank), steps=20, between=between)
    except RanksDisagree as error:
        return "" if "param_groups[0]['lr'] is 0.001" in str(error) and "0.0005" in str(error) else str(error)
    return "nothing was raised"


if __name__ == "__main__":
    main()
