"""Shared by the setups of other libraries: a model with rank 0's values, the job's variables, and a step."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from shardwise.comm.groups.dtensor import dtensor_types
from shardwise.engine.activations.compiled_units import compile_units
from shardwise.engine.torch_engine.prepare import rename_parameters, to_master_dtype
from shardwise.plan import Plan
from shardwise.program.spec import ROOT
from shardwise.program.units import unit_modules
from shardwise.program.units.materialize import materialize
from shardwise.program.units.unit_modules import units_from_root
from shardwise.training.loop.batches import to_device
from shardwise.training.loop.training_state import Training, Update


@contextmanager
def job_variables(device: torch.device) -> Iterator[None]:
    """Set the variables from which other libraries read the job, for a job on one machine, where they expect the local
    rank to be the index of the device.

    Afterwards all variables are restored, and the number of threads, which must be the same for all engines.
    """
    rank, num_ranks, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    local_rank = rank if device.index is None else device.index
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


def accumulating(
    optimizer: Any,
    *,
    backward: Callable[[Tensor], Any],
    clip: Callable[[float], Tensor],
    no_sync: Callable[[bool], AbstractContextManager[None]],
) -> Update:
    """Return an update like train/update.update, made of another library's functions."""

    def update(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
        total = torch.zeros((), device=training.device)
        for number, (weight, batch) in enumerate(zip(weights, batches, strict=True)):
            with no_sync(number + 1 < len(batches)):
                loss = training.task.loss(training.model, to_device(batch, training.device)) * weight
                backward(loss)
            total += loss.detach()
        norm = clip(training.config.train.clip_norm) if training.config.train.clip_norm else None
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.full_tensor() if isinstance(norm, dtensor_types()) else norm

    return update


def make_real(model: nn.Module, optimizer: Optimizer, *, plan: Plan, device: torch.device) -> None:
    """Put the model on the device in fp32, with the values of rank 0, and wrap units that are recomputed."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    materialize(model, device=device)
    model.to(device)
    to_master_dtype(model, plan=plan)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    rename_parameters(optimizer, names=names, parameters=dict(model.named_parameters()))
    units = unit_modules(model, policy=plan.units)
    compile_units(units, plan=plan)
    for name, module in units.items():
        if plan.recompute_of(name) == "full":
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def unit_classes(model: nn.Module, *, plan: Plan) -> set[type[nn.Module]]:
    """Return the classes that others wrap: of blocks, since that of a large layer is the class of many a small one."""
    others = {ROOT, *units_from_root(model, policy=plan.units)}
    return {type(module) for name, module in unit_modules(model, policy=plan.units).items() if name not in others}
