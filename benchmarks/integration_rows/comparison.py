"""What the rows of benchmarks/integrations.py share: how two trainings are compared, and where results go."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STOCK = "stock"
STRATEGIES = ("ddp", "zero2", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a training: numbers that it told (losses, metrics), norms of gradients, and its weights."""

    numbers: list[float]
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scenario. `run(strategy)` trains by it, or by the framework's own DDP (STOCK), in a folder of its own.

    bound   how far numbers and weights may be from the stock framework's: 0 is bit for bit
    """

    name: str
    run: Callable[[str, Path], Trained]
    bound: float = 0.0


def distance(trained: Trained, stock: Trained) -> float:
    """The largest difference of a number or a weight; infinite where something is missing, or a norm is another one.

    Frameworks sum a norm in fp32, we in float64: it is the same to 1e-6 of itself.
    """
    same = len(trained.numbers) == len(stock.numbers) and set(trained.weights) == set(stock.weights)
    norms = torch.tensor(trained.norms), torch.tensor(stock.norms)
    if not same or len(norms[0]) != len(norms[1]) or not torch.allclose(*norms, rtol=1e-6, atol=0):
        return float("inf")
    pairs = [
        (torch.tensor(trained.numbers, dtype=torch.float64), torch.tensor(stock.numbers, dtype=torch.float64)),
        *((trained.weights[name].double().cpu(), stock.weights[name].double().cpu()) for name in stock.weights),
    ]
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.numel()), default=0.0)


def asked() -> tuple[Path, list[str]]:
    """The folder and the strategies that a script is started with."""
    return Path(sys.argv[1]), sys.argv[2:] or list(STRATEGIES)


def compare(rows: list[Row]) -> None:
    """Run every row on this rank, and leave rank 0's findings in the folder: row → strategy → distance and bound."""
    folder, strategies = asked()
    found: dict[str, Any] = {}
    for number, row in enumerate(rows):
        stock = row.run(STOCK, folder / f"{number}-{STOCK}")
        distances = {}
        for strategy in strategies:
            trained = row.run(strategy, folder / f"{number}-{strategy}")
            worst = torch.tensor(distance(trained, stock), dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            distances[strategy] = float(worst)
        found[row.name] = {"bound": row.bound, "distance": distances, "numbers": len(stock.numbers)}
        if os.environ["RANK"] == "0":
            print(row.name, distances, flush=True)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
