"""What the rows of benchmarks/integrations.py share: how two trainings are compared, and where results go."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STOCK = "stock"
# The strategy that resumes what each has begun.
OTHER = {"ddp": "fsdp", "zero2": "ddp", "fsdp": "zero2"}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a training: numbers that it logged (losses, metrics), norms of gradients, and its weights."""

    numbers: list[float]
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


# Name of a row → how it trains (by a strategy or, STOCK, by the framework's own DDP; in a folder of its own), and how
# far numbers and weights may be from the stock framework's: 0 is bit for bit.
Rows = Mapping[str, tuple[Callable[[str, Path], Trained], float]]


def distance(trained: Trained, stock: Trained) -> float:
    """Return the largest difference of a number or a weight; infinite where something is missing or a norm differs.

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
    """Return the folder and the strategies that a script is started with."""
    return Path(sys.argv[1]), sys.argv[2:] or list(OTHER)


def write(found: Mapping[str, Any]) -> None:
    """Leave row → {"bound": …, "distance": {strategy: …}} in the folder."""
    (asked()[0] / "found.json").write_text(json.dumps(found))


def compare(rows: Rows) -> None:
    """Run every row on this rank; rank 0 writes what was found."""
    folder, strategies = asked()
    found: dict[str, Any] = {}
    for number, (name, (run, bound)) in enumerate(rows.items()):
        stock = run(STOCK, folder / f"{number}-{STOCK}")
        distances = {}
        for strategy in strategies:
            trained = run(strategy, folder / f"{number}-{strategy}")
            worst = torch.tensor(distance(trained, stock), dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            distances[strategy] = float(worst)
        found[name] = {"bound": bound, "distance": distances}
    if os.environ["RANK"] == "0":
        write(found)
