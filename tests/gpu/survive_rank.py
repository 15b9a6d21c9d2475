"""One of two ranks that share a GPU and run out of its memory: `python survive_rank.py RANK RANKS FOLDER DEVICE`.

Leaves, of each rank, name → how many steps failed, how many were survived, and where its end differs from that of a run
that never failed and was given the same plans before the same steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_cases import deterministic
from surviving_run import expected, points_of, survived
from test_replan import differences

from shardwise import Plan

# Three failing steps each.
CASES = {
    "ddp fp32": ("gpt", "groups", Plan(strategy="ddp", capture="off"), 1),
    "batch norm zero1 fp32": ("resnet", "groups", Plan(strategy="zero1", capture="off"), 2),
    "zero2 bf16": ("gpt", "adamw fused", Plan(strategy="zero2", precision="bf16", capture="off"), 3),
    "fsdp fp16": ("gpt", "groups", Plan(precision="fp16", capture="off"), 4),
}


def compared(name: str, *, rank: int, num_ranks: int, device: str) -> dict[str, Any]:
    model, optimizer, plan, seed = CASES[name]
    points = points_of(seed, num_ranks=num_ranks)
    plans, said, found = survived(rank, model, optimizer, plan, points, device)
    wanted = expected(rank, model, optimizer, plan, plans, device)
    return {
        "failed": len({point.step for point in points}),
        "survived": len(said) if rank == 0 else None,
        "differences": differences(found, wanted),
    }


def main() -> None:
    rank, num_ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    found = {}
    with deterministic():
        for name in CASES:
            found[name] = compared(name, rank=rank, num_ranks=num_ranks, device=device)
            print(rank, name, found[name], flush=True)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
