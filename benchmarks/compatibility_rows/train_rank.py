"""One rank of the compatibility matrix: trains each asked architecture with each contestant, and compares.

    train_rank.py NOTES ARCHITECTURE/CONTESTANT…

Rank 0 appends a line of JSON to NOTES when a training begins, and another with its verdict. Ranks that do not come back
from one in time end; whoever started them finds in NOTES which it was.
"""

import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.plan import Plan
from shardwise.units import unit_modules

NUM_STEPS = 3
NUM_RANKS = 2
CLOSE = 1e-5
# Of the model's largest value: a tensor whose gradient is truly zero (attention's key bias) holds only rounding.
LEAST = 1e-3
LIMIT_SECONDS = 180
Weights = dict[str, Tensor]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam: it makes much of a gradient that is zero but for its last bits."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(architecture: Architecture, *, step: int, rank: int) -> Any:
    return architecture.batch(torch.Generator().manual_seed(100 * step + rank))


def in_one_process(architecture: Architecture) -> Weights:
    """The ranks' batches in rank order, their gradients summed and × 1 / ranks."""
    model = architecture.make()
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(NUM_RANKS):
            model.zero_grad()
            architecture.loss(model, batch_of(architecture, step=step, rank=rank)).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] * (1 / NUM_RANKS) if name in sums else None
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def steps(architecture: Architecture, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(NUM_STEPS):
        architecture.loss(model, batch_of(architecture, step=step, rank=dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_shardwise(strategy: str) -> Callable[[Architecture], Weights]:
    def train(architecture: Architecture) -> Weights:
        model = architecture.make()
        optimizer = make_optimizer(model)
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
        steps(architecture, model, optimizer)
        state = shardwise.full_state_dict(model)["model"]
        return {name: state[name] for name, _ in model.named_parameters()}

    return train


def on_ddp(architecture: Architecture) -> Weights:
    model = architecture.make()
    wrapped = DistributedDataParallel(model)
    steps(architecture, wrapped, make_optimizer(wrapped))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def on_fully_shard(architecture: Architecture) -> Weights:
    """torch's own, at the units that `units = "auto"` finds."""
    model = architecture.make()
    for module in reversed(unit_modules(model).values()):
        fully_shard(module)
    steps(architecture, model, make_optimizer(model))
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


CONTESTANTS: dict[str, Callable[[Architecture], Weights]] = {
    **{name: on_shardwise(name) for name in ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")},
    "torch-ddp": on_ddp,
    "fully_shard": on_fully_shard,
}


def verdict_of(train: Callable[[Architecture], Weights], architecture: Architecture, expected: Weights) -> Any:
    """What came of it on this rank: equal, close, wrong, refused or failed."""
    try:
        found = train(architecture)
    except shardwise.ShardwiseError as error:
        return {"verdict": "refused", "line": first_line(error)}
    except Exception as error:
        return {"verdict": "failed", "line": f"{type(error).__name__}: {first_line(error)}"}
    if found.keys() != expected.keys():
        return {"verdict": "wrong", "line": f"{len(found)} parameters, not {len(expected)}"}
    least = LEAST * max((value.abs().max().item() for value in expected.values() if value.numel()), default=0.0)
    distance = max((distance_of(found[name], value, least=least) for name, value in expected.items()), default=0.0)
    verdict = "equal" if distance == 0 else "close" if distance <= CLOSE else "wrong"
    return {"verdict": verdict, "distance": distance}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def distance_of(found: Tensor, expected: Tensor, *, least: float) -> float:
    """The largest difference, as a part of the tensor's largest value, or of `least`; 0 where all bits are equal."""
    if torch.equal(found, expected):
        return 0.0
    difference = (found - expected).abs().max().item()
    most = max(expected.abs().max().item(), least)
    return difference / most if most and difference == difference else float("inf")


WORST = ("failed", "wrong", "refused", "close", "equal")


def together(mine: Any) -> Any:
    """The worst of the ranks' verdicts."""
    everyone: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(everyone, mine)
    return min(everyone, key=lambda one: (WORST.index(one["verdict"]), -one.get("distance", 0.0)))


def asked(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each architecture with its contestants."""
    for name in dict.fromkeys(one.rpartition("/")[0] for one in names):
        yield name, [one.rpartition("/")[2] for one in names if one.rpartition("/")[0] == name]


class Notes:
    """What rank 0 writes down, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **values: Any) -> None:
        if dist.get_rank() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(values) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    notes = Notes(Path(sys.argv[1]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    for name, contestants in asked(sys.argv[2:]):
        architecture = ARCHITECTURES[name]
        notes.add(begins=name, contestant="one process")
        try:
            expected = in_one_process(architecture)
        except Exception as error:
            notes.add(architecture=name, contestant="one process", verdict="failed", line=repr(error)[:300])
            continue
        model = architecture.make()
        notes.add(
            architecture=name,
            contestant="one process",
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            units=len(unit_modules(model)),
            finite=all(bool(value.isfinite().all()) for value in expected.values()),
        )
        del model
        for contestant in contestants:
            notes.add(begins=name, contestant=contestant)
            started = time.monotonic()
            found = together(verdict_of(CONTESTANTS[contestant], architecture, copy.copy(expected)))
            notes.add(architecture=name, contestant=contestant, seconds=time.monotonic() - started, **found)
    # What a training that failed has left under way must not hold up the end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
