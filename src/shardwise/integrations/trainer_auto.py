"""`plan="auto"` in a Trainer: its model and loss are traced with its first batch, and a plan is solved."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.errors import InvalidPlan
from shardwise.plan import Plan
from shardwise.tasks import Task
from shardwise.train.automatic import auto_plan


def solved_plan(trainer: Any, *, plan: Plan) -> Plan:
    """The plan for this trainer's model, batch and devices. Collective: rank 0 solves, all get its plan."""
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
    """Drawn as training will; nothing that is drawn later is another for that. Collective."""
    device = trainer.accelerator.device
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Each loader that is made is noted there, for states that are saved.
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
    """Batches of any number of samples, made of the samples of one."""
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise InvalidPlan(
            f"plan = 'auto': the batch's tensors have {sorted(sizes)} entries, so that its samples cannot be told "
            "apart; choose a plan with shardwise.Plan.auto(task), or by `shardwise plan`"
        )
    (size,) = sizes

    def make(number: int) -> dict[str, Any]:
        chosen = torch.arange(number) % size
        return {
            name: value[chosen] if isinstance(value, Tensor) and value.dim() > 0 else value
            for name, value in batch.items()
        }

    return make
