"""The parts of an engine for one plan: buffers, units, the runner of its steps, and the optimizers' side."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shardwise.comm.agreement import exchange
from shardwise.comm.collectives import Collectives
from shardwise.comm.groups import MeshGroups
from shardwise.engine.core.broadcast import broadcast_buffers
from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.host import HostCopies
from shardwise.engine.core.learn import FirstForward
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.core.runner import Runner
from shardwise.engine.core.tape import Tape
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.used import UsedFlags
from shardwise.engine.guards.first_inputs import FirstInputs
from shardwise.engine.guards.managed import ManagedParameters
from shardwise.engine.guards.replicas import Replicas
from shardwise.engine.optimizer.any_step import look_after
from shardwise.engine.optimizer.known import Stepped
from shardwise.engine.optimizer.matrices import OwnedMatrices
from shardwise.engine.optimizer.owned import AroundSteps, OwnedParameters
from shardwise.engine.optimizer.ownership import own
from shardwise.engine.prepared.edit import editing
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program import Bucket
from shardwise.program.buffers import FlatSpec, flat_specs
from shardwise.spec import ModelSpec
from shardwise.units import unit_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """What all parts of an engine are made with."""

    spec: ModelSpec
    plan: Plan
    groups: MeshGroups
    collectives: Collectives
    tape: Tape
    device: torch.device
    host: HostCopies | None
    alignment: int
    compare_every: int


def make_units(model: nn.Module, *, setting: EngineSetting) -> dict[str, Unit]:
    plan = setting.plan
    modules = unit_modules(model, policy=plan.units)
    placements = plan.placements(modules)
    parameters = dict(model.named_parameters())
    units: dict[str, Unit] = {}
    for unit in setting.spec.units:
        placement = placements[unit.name]
        flats = [
            make_flat(
                [parameters[param.name] for param in flat.params], spec=flat, placement=placement, setting=setting
            )
            for flat in flat_specs(unit, plan=plan)
        ]
        units[unit.name] = Unit(
            unit.name, module=modules[unit.name], placement=placement, flats=flats, tape=setting.tape
        )
    for made in units.values():
        for flat in made.flats:
            flat.lay_out()
    return units


def make_flat(
    params: list[nn.Parameter], *, spec: FlatSpec, placement: Placement, setting: EngineSetting
) -> FlatParams:
    """A buffer for these parameters, with nothing in it yet; `lay_out` comes next."""
    return FlatParams(
        params,
        spec=spec,
        placement=placement,
        device=setting.device,
        groups=setting.groups,
        collectives=setting.collectives,
        alignment=setting.alignment,
        host=setting.host if placement.grads is SHARDED else None,
    )


def make_runner(
    model: nn.Module, *, units: dict[str, Unit], inputs: FirstInputs, passes: PassState, setting: EngineSetting
) -> Runner:
    """What runs the steps of a model whose units have their buffers."""
    plan, groups, collectives, tape = setting.plan, setting.groups, setting.collectives, setting.tape
    flats = [flat for unit in units.values() for flat in unit.flats]

    def make_bucket(bucket: Bucket) -> ReduceBucket:
        return ReduceBucket(
            bucket,
            units=[units[name] for name in bucket.units],
            groups=groups,
            collectives=collectives,
            tape=tape,
            passes=passes,
        )

    def broadcast() -> None:
        broadcast_buffers(model, source=passes.source, groups=groups, collectives=collectives, tape=tape)

    return Runner(
        setting.spec,
        plan=plan,
        units=units,
        make_bucket=make_bucket,
        make_first_forward=lambda: FirstForward(units, exchange=partial(exchange, group=groups.gather)),
        gather_seen=inputs.gather_seen,
        broadcast_buffers=broadcast,
        flags=UsedFlags(
            units.values(), device=setting.device, groups=groups, collectives=collectives, tape=tape, passes=passes
        ),
        passes=passes,
        land=setting.host.land if setting.host is not None else lambda: None,
        managed=ManagedParameters(model, flats=flats),
        matrices=OwnedMatrices(units, tape=tape),
        replicas=Replicas(flats, groups=groups, every=setting.compare_every),
        tape=tape,
    )


def around_steps(runner: Runner) -> AroundSteps:
    return AroundSteps(
        before_step=runner.before_step,
        after_step=runner.after_step,
        forget_grads=runner.forget_grads,
        edit=lambda: editing(runner),
        own=partial(own, runner),
        owns=lambda name: runner.plan.owns(name),
        matrices=runner.matrices,
    )


def make_owned(
    flats: list[FlatParams], *, before: list[list[nn.Parameter]], runner: Runner, any_optimizer: bool
) -> OwnedParameters:
    owned = OwnedParameters(around_steps(runner), any_optimizer=any_optimizer, flats=flats)
    look_after(owned)
    for flat, old_params in zip(flats, before, strict=True):
        parts = {part.index: part.parameter for part in flat.owned}
        stepped = Stepped(sharded=flat.placement.optim is SHARDED, dtype=flat.master_dtype)
        for index, name in enumerate(flat.names):
            for parameter in (flat.params[index], old_params[index]):
                owned.add(parameter, name=name, owned=parts.get(index), stepped=stepped)
    return owned
