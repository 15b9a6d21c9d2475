"""Advice on an out-of-memory error of a training: the planner's prediction, and a change of the plan that fits.

The engine has already noted on the error what the memory was held for (engine/out_of_memory/out_of_memory.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from shardwise.comm.join import Place
from shardwise.train.config import TrainConfig
from shardwise.train.fitting_plan import FullDevice

# The other ranks wait for it; the watchdog's limit (run.watch_seconds) is longer.
_LIMIT_SECONDS = 60.0


@contextmanager
def advised(config: TrainConfig, *, place: Place) -> Iterator[None]:
    """Add the planner's lines to an out-of-memory error in this block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note("\n".join(f"  {line}" for line in _advice(config, place=place)))
        raise


def _advice(config: TrainConfig, *, place: Place) -> list[str]:
    is_cuda = place.device.type == "cuda"
    full = FullDevice(
        kind=place.device.type,
        title=torch.cuda.get_device_name(place.device) if is_cuda else "cpu",
        capacity_bytes=torch.cuda.get_device_properties(place.device).total_memory if is_cuda else None,
        num_ranks=place.num_ranks,
    )
    try:
        done = subprocess.run(
            # -P: like our own command, without the working folder among the modules.
            [sys.executable, "-P", "-m", "shardwise.train.fitting_plan"],
            input=json.dumps({"config": config.to_dict(), "full": asdict(full)}),
            # The device is full: the task must load without it.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.splitlines()
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {_LIMIT_SECONDS:g} s"
    plan = config.plan
    return [
        f"what fits was not predicted ({why}); to try it: shardwise plan {config.task.model} --cluster "
        f"{place.num_ranks}xDEVICE --precision {plan.precision} --micro-batch {plan.micro_batch}"
    ]
