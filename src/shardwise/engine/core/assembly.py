"""The parts of a core for one plan: buffers, units, and the core itself."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.groups.agreement import together
from shardwise.comm.groups.collectives import Collectives
from shardwise.comm.groups.groups import mesh_groups
from shardwise.engine.core.broadcast import fill
from shardwise.engine.core.core import Core
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.optimizer_slices import OptimizerSlices
from shardwise.engine.core.unit import Unit
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.buffers import FlatSpec, flat_specs
from shardwise.program.rules.context import has_states_on_host
from shardwise.program.units import cut_model


def make_units(model: nn.Module, *, modules: Mapping[str, nn.Module], setting: CoreSetting) -> dict[str, Unit]:
    """Make the units of these modules of the model, with buffers that are still to be filled."""
    plan = setting.plan
    placements = plan.placements(modules)
    parameters = dict(model.named_parameters())
    units: dict[str, Unit] = {}
    for unit in setting.spec.units:
        placement = placements[unit.name]
        flats = [
            make_flat(
                [parameters[param.name] for param in flat.params],
                unit=unit.name,
                spec=flat,
                placement=placement,
                setting=setting,
            )
            for flat in flat_specs(unit, plan=plan)
        ]
        units[unit.name] = Unit(unit.name, module=modules[unit.name], placement=placement, flats=flats, setting=setting)
    for made in units.values():
        for flat in made.flats:
            flat.lay_out()
    return units


def make_flat(
    params: list[nn.Parameter], *, unit: str, spec: FlatSpec, placement: Placement, setting: CoreSetting
) -> FlatParams:
    """Make an empty buffer for these parameters of a unit; `lay_out` comes next."""
    on_host = has_states_on_host(unit, plan=setting.plan, placement=placement)
    host = setting.host if on_host else None
    return FlatParams(params, spec=spec, placement=placement, setting=setting, host=host)


def make_core(
    model: nn.Module,
    *,
    modules: Mapping[str, nn.Module],
    setting: CoreSetting,
    weights: Mapping[str, Tensor] | None = None,
    on_filled: Callable[[FlatParams, int, nn.Parameter, nn.Module], None] | None = None,
) -> tuple[Core, list[tuple[FlatParams, int, nn.Parameter]]]:
    """Give the model its buffers, with rank 0's values, and make the core that runs its steps.

    Also returns the parameters that an optimizer may hold, with their places: those of the model, and those that were
    on the meta device and have been replaced.
    """
    units = together(lambda: make_units(model, modules=modules, setting=setting))
    flats = [flat for unit in units.values() for flat in unit.flats]
    before = [(flat, index, parameter) for flat in flats for index, parameter in enumerate(flat.params)]
    fill(model, flats=flats, groups=setting.groups, device=setting.device, weights=weights, on_filled=on_filled)
    core = Core(model, units=units, setting=setting)
    now = [(flat, index, flat.params[index]) for flat, index, _ in before]
    return core, [*now, *(place for place, new in zip(before, now, strict=True) if place[2] is not new[2])]


def assemble(
    model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, *, collectives: Collectives, device: torch.device
) -> Core:
    """Make a model and its optimizers run a plan, by the core alone. The process group is there already.

    `shardwise.prepare` does the same with everything around it: checks, guards, graphs of units and so on.
    """
    units = cut_model(model, policy=plan.units)
    setting = CoreSetting(
        spec=units.spec,
        plan=plan,
        groups=mesh_groups(plan.mesh or Mesh(shard=dist.get_world_size())),
        collectives=collectives,
        device=device,
    )
    core, places = make_core(model, modules=units.modules, setting=setting)
    for unit in core.units.values():
        unit.settle()
    slices = OptimizerSlices(core)
    for flat, index, parameter in places:
        slices.cover(flat, index, parameter)
    for optimizer in optimizers:
        slices.adopt(optimizer)
    core.attach()
    return core
