"""What adapters on a frozen base cost: bytes that are reduced and gathered in a step, and its peak memory, by strategy.

    PYTHONPATH=src python benchmarks/frozen_parameters.py

A rehearsal of rank 0 of 2 on this machine's CPU: real memory, no wire. The model is a GPT of which all is frozen, with
low-rank adapters on the linears of its blocks. Bytes are counted on the engine's tape, memory tensor by tensor.
"""

import argparse

import torch
from torch import Tensor, nn

from shardwise.comm.absent import AbsentCollectives, absent_group
from shardwise.engine.engine import tape
from shardwise.engines import prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.profile.cpu_allocations import LiveBytes
from shardwise.program import Kind
from shardwise.tasks import cross_entropy

MIB = 2**20
SHAPE = GPTShape(num_layers=8, width=512, num_heads=8, vocab_size=8192, max_seq=64)
NUM_STEPS = 3


class Adapter(nn.Module):
    """A frozen linear, and the product of two small matrices on top."""

    def __init__(self, base: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(*, rank: int) -> nn.Module:
    model = build_model(SHAPE).requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "blocks." in path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Adapter(module, rank=rank))
    return model


def measure(strategy: str, *, rank: int) -> list[float]:
    """MiB reduced, gathered, gathered after the update; held between steps, and the peak of a step."""
    with LiveBytes() as live:
        model = adapted(rank=rank)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        plan = Plan(strategy=strategy, units="auto")
        prepare(model, optimizer, plan, collectives=AbsentCollectives())
        tokens = torch.randint(SHAPE.vocab_size, (1, SHAPE.max_seq + 1))
        with tape(model) as recorded:
            for _ in range(NUM_STEPS):
                recorded.take()
                with live.phase("step"):
                    cross_entropy(model, (tokens[:, :-1], tokens[:, 1:])).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            entries = recorded.take()
    update = next(index for index, entry in enumerate(entries) if entry.kind is Kind.UPDATE)
    reduced = sum(entry.num_bytes for entry in entries if entry.kind is Kind.REDUCE)
    gathered = [sum(e.num_bytes for e in part if e.kind is Kind.GATHER) for part in (entries, entries[update:])]
    return [size / MIB for size in (reduced, *gathered, live.end_bytes("step"), live.peak_bytes("step"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=4, help="rank of the adapters (default: 4)")
    rank = parser.parse_args().rank
    model = adapted(rank=rank)
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad is kind) for kind in (False, True)]
    print(f"frozen {4 * counts[0] / MIB:.1f} MiB, trained {4 * counts[1] / MIB:.2f} MiB")
    print(f"{'MiB per step':14} {'reduced':>9} {'gathered':>9} {'after update':>13} {'at rest':>9} {'peak':>9}")
    for strategy in STRATEGIES:
        with absent_group(2):
            found = measure(strategy, rank=rank)
        widths = (9, 9, 13, 9, 9)
        print(f"{strategy:14}", *(f"{size:{width}.2f}" for size, width in zip(found, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
