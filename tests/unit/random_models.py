"""Small random models for the solver's tests: a few blocks of unlike sizes, traced, and every plan that they have."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from shardwise.hardware import Cluster, cluster_of
from shardwise.models.trace import Way, trace_model
from shardwise.plan import Plan
from shardwise.planner.search.dial import Choice, Dial, turned_units
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import meshes
from shardwise.planner.search.request import RECOMPUTES
from shardwise.program.spec import ModelSpec

PLAN = Plan(precision="bf16")


class Mlp(nn.Module):
    def __init__(self, width: int, *, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Stack(nn.Module):
    """Blocks in a list, so that each is a unit, between two layers of the root."""

    def __init__(self, blocks: list[nn.Module], *, width: int) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(64, width), nn.ModuleList(blocks), nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """`rows`: the strategies that its units may have, so that all plans can be tried."""

    spec: ModelSpec
    cluster: Cluster
    rows: tuple[str, ...]
    batch: int

    def costs(self) -> DialCosts:
        return DialCosts(spec=self.spec, base=PLAN, cluster=self.cluster, optimizer="adamw")

    def dials(self) -> Iterator[Dial]:
        """Every plan: each unit with each choice, the root with each row, each prefetch."""
        choices = [Choice(row, way) for row in self.rows for way in RECOMPUTES]
        mesh = meshes(self.rows[-1], plan=PLAN, cluster=self.cluster)[0]
        count = len(turned_units(self.spec))
        for chosen in product(choices, repeat=count):
            for root in self.rows:
                for prefetch in (0, 1, 2) if count < 3 or len(choices) < 6 else (1,):
                    yield Dial(root=root, choices=chosen, mesh=mesh, prefetch=prefetch, batch=self.batch, accumulate=1)


def random_model(seed: int) -> RandomModel:
    """Two to four blocks, some of them alike, on one node whose links are fast or slow."""
    draw = random.Random(seed)
    count = draw.choice((2, 2, 3, 3, 4))
    width = draw.choice((1024, 2048, 4096))
    inners = [width * draw.choice((1, 2, 4, 8)) for _ in range(count)]
    if draw.random() < 0.5:
        inners = [inners[0]] * count
    with torch.device("meta"):
        model = Stack([Mlp(width, inner=inner) for inner in inners], width=width)
    spec = trace_model(
        model,
        loss=lambda model, batch: model(batch).float().square().mean(),
        make_batch=lambda size: torch.ones(size, 64),
        name=f"random-{seed}",
        ways=[Way(computes_in="bf16", recompute=recompute, device="cuda") for recompute in RECOMPUTES],
    )
    every = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
    chosen = draw.sample(every, {2: draw.choice((3, 5)), 3: 2, 4: draw.choice((1, 1, 2))}[count])
    rows = tuple(row for row in every if row in chosen)
    cluster = cluster_of(draw.choice(("2xh100-80gb", "8xa100-40gb", "8xh100-80gb")))
    return RandomModel(spec=spec, cluster=cluster, rows=rows, batch=draw.choice((4096, 16384, 65536)))
