"""What a rank runs for a row of benchmarks/scenarios.py."""

from typing import Any

import torch
from scenario_rows import optimizers, trainings
from scenario_rows.runners import Runner, make_runner
from torch import Tensor
from torch.distributed.tensor import DTensor

GROUPS = {"Optimizers": optimizers.ROWS, "Trainings": trainings.ROWS}


def train(rank: int, group: str, name: str, engine: str) -> dict[str, Any]:
    """The body of a rank: the weights at the end, or the last line of what it ended with."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        weights = GROUPS[group][name](make_runner(engine, rank))
        return {"weights": {name: whole(value) for name, value in weights.items()}}
    except Exception as error:
        if engine == Runner.name:
            raise
        return {"kind": type(error).__module__.split(".")[0], "line": f"{type(error).__name__}: {error}"}


def whole(value: Tensor) -> Tensor:
    """All of a tensor that torch has sharded. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value
