"""`plan="auto"` in a Trainer: trace its model and loss with its first batch, and solve a plan."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.base.errors import InvalidPlan
from shardwise.models.tasks import Task
from shardwise.plan import Plan
from shardwise.training.fitting.automatic import auto_plan


def solved_plan(trainer: Any, *, plan: Plan) -> Plan:
    """Return a plan for this trainer's model, batch and devices. Collective: rank 0 solves for all."""
    args = trainer.args
    task = Task(
        model=trainer.model,
        loss=lambda model, batch: trainer.compute_loss(model, dict(batch)),
        make_batch=_of_size(_first_batch(trainer)),
    )
    found = auto_plan(
        task,
        plan=replace(plan, micro_batch=args.per_device_train_batch_size, accumulate=args.gradient_accumulation_steps),
        optimizer="sgd" if "sgd" in str(getattr(args.optim, "value", args.optim)) else "adamw",
    )
    # The Trainer accumulates by itself.
    return replace(found, accumulate=1)


def _first_batch(trainer: Any) -> dict[str, Any]:
    """Return the first batch of training, without a change to any later random number. Collective."""
    device = trainer.accelerator.device
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # The accelerator records each loader, to save its state.
    noted = trainer.accelerator._dataloaders
    num_noted = len(noted)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            batch = next(iter(trainer.get_train_dataloader()), None)
    finally:
        del noted[num_noted:]
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if batch is None:
        raise InvalidPlan("plan = 'auto': the training data has no batch to trace the model with")
    first: dict[str, Any] = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, dict(batch))
    return first


def _of_size(batch: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Return a function that makes batches of any size from the samples of one batch."""
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise InvalidPlan(
            f"plan = 'auto': the batch's tensors have {sorted(sizes)} entries, so that its samples cannot be "
            "separated; choose a plan with shardwise.Plan.auto(task), or by `shardwise plan`"
        )
    (size,) = sizes

    def make(number: int) -> dict[str, Any]:
        chosen = torch.arange(number) % size
        return {
            name: value[chosen] if isinstance(value, Tensor) and value.dim() > 0 else value
            for name, value in batch.items()
        }

    return make
