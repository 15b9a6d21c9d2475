"""One rank that trains on a GPU over NCCL, or on a CPU over Gloo: `python nccl_rank.py RANK RANKS FOLDER DEVICE`.

Several NCCL ranks can share one GPU when each says that it is another host and they talk over the loopback.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise
from shardwise import Plan
from shardwise.models.build import build_model
from shardwise.models.shapes import GPTShape
from shardwise.placement import STRATEGIES
from shardwise.tasks import cross_entropy

SHAPE = GPTShape(num_layers=3, width=96, num_heads=3, vocab_size=101, max_seq=32)


def losses(plan: Plan, *, rank: int, num_ranks: int, device: str) -> list[float]:
    torch.manual_seed(0)
    model = build_model(SHAPE, device="cpu").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shardwise.prepare(model, optimizer, plan)
    found = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step * num_ranks + rank)
        tokens = torch.randint(SHAPE.vocab_size, (2, 33), generator=generator).to(device)
        loss = cross_entropy(model, (tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        found.append(mean.item() / num_ranks)
    return found


def main() -> None:
    rank, num_ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / f"store-{device}-{num_ranks}"), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    results = {
        f"{strategy} {precision}": losses(
            Plan(strategy=strategy, precision=precision, prefetch=2), rank=rank, num_ranks=num_ranks, device=device
        )
        for strategy in STRATEGIES
        for precision in ("fp32", "bf16")
    }
    if rank == 0:
        (folder / f"losses-{device}-{num_ranks}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
