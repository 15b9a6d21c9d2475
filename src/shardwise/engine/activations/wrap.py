"""Wraps the forward of each unit as the plan says: tiles, compile, recompute, offload."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from shardwise.base.vocabulary.dtypes import PRECISIONS
from shardwise.engine.activations.compiled_units import compile_units
from shardwise.engine.activations.offload import ActivationOffload, offload_unit
from shardwise.engine.activations.recompute import recompute_unit
from shardwise.engine.activations.saved import Kept
from shardwise.engine.activations.tiled import tile_modules
from shardwise.engine.core.precision import torch_dtype
from shardwise.engine.core.unit import Unit
from shardwise.plan import Plan


def wrap_units(
    model: nn.Module, *, units: Mapping[str, Unit], plan: Plan, device: torch.device
) -> list[Callable[[], None]]:
    """Wrap each unit's forward as the plan says; return the functions that undo it, to be called in reverse order."""
    undo: list[Callable[[], None]] = []
    dtype = torch_dtype(PRECISIONS[plan.reduce_dtype])
    # Innermost, because they are parts of units.
    undo += tile_modules(model, tile=plan.tile, units=units, dtype=dtype)
    # Inside of recomputation: a recomputation runs the compiled code again.
    undo += compile_units({name: unit.module for name, unit in units.items()}, plan=plan)
    offload = ActivationOffload(model, device=device) if plan.offload_activations else None
    for name, unit in units.items():
        mode = plan.recompute_of(name)
        on_host = plan.has_activations_on_host(name) and not unit.from_root
        if mode != "none":
            pack = offload.pack if offload is not None and on_host else Kept
            undo.append(recompute_unit(unit.module, mode=mode, pack=pack))
        if offload is not None and on_host:
            # Outside of the recomputation, so that the unit's inputs are offloaded.
            undo.append(offload_unit(unit.module, name=name, offload=offload))
    return undo
