"""`replan`: changes the plan of a prepared model between two steps, without a checkpoint.

The model and the optimizer stay the same objects. Their buffers are exchanged unit by unit, those first that become
smaller: a rank holds no more than the larger of both plans, and one unit. Training continues bit for bit as if it had
been saved under the old plan and loaded under the new one.
"""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.comm.groups.agreement import agree, meet
from shardwise.comm.groups.groups import mesh_groups
from shardwise.engine.checked_plan import check_plan
from shardwise.engine.core.assembly import make_flat
from shardwise.engine.core.core import Core
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.edited_values import distribute
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.unit import Unit
from shardwise.engine.engine import EngineParts
from shardwise.engine.fp8.fp8_bytes import Fp8Bytes
from shardwise.engine.guards.guard import guard_units, wake
from shardwise.engine.guards.guards import Guards
from shardwise.engine.last_issued import write_records_of
from shardwise.engine.offload.host_room import check_host_room, host_bytes
from shardwise.engine.offload.transfer import host_copies
from shardwise.engine.optimizer.allocate import suit_devices
from shardwise.engine.optimizer.streamed_update import check_streamed
from shardwise.engine.plan_change.reshard import StatesAndGrads, move, states_and_grads
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.spec import UnitSpec

# Settings that cannot change: another value would change the computation, or the units.
_FIXED = (
    "units",
    "precision",
    "keep_fp32",
    "fp8_recipe",
    "fp8_min_features",
    "keep_bf16",
    "reduce_dtype",
    "tile",
    "compile",
    "engine",
    "collectives",
)
_WHAT = "shardwise.replan"


def replan(engine: EngineParts, plan: Plan) -> None:
    """Change the plan of a prepared model between two steps, without a checkpoint. Collective.

        shardwise.replan(model, Plan(strategy="fsdp"))      # on every rank; the loop continues as it was

    Strategy, overrides, mesh, recompute, offload, prefetch and the like may change; settings that decide what is
    computed (precision, units, …) may not. Parameters, gradients, optimizer state and averages (shardwise.EMA) move
    unit by unit: a rank holds no more than the larger of both plans and one unit. Training continues bit for bit as if
    it had been saved under the old plan and resumed under the new one.
    """
    meet(_WHAT, limit_seconds=engine.core.followed.limit_seconds)
    mesh = plan.mesh or Mesh(shard=dist.get_world_size())
    agree(lambda: _checked(engine, plan=plan, mesh=mesh), what="plans")
    if plan == engine.core.followed.plan:
        return
    setting = CoreSetting(
        spec=engine.core.followed.spec,
        plan=plan,
        groups=mesh_groups(mesh),
        collectives=engine.core.setting.collectives,
        device=engine.device,
        host=host_copies(plan, device=engine.device),
        narrow=Fp8Bytes,
        tape=engine.core.setting.tape,
        passes=engine.core.setting.passes,
    )
    others = states_and_grads(engine)
    engine.detach()
    try:
        _swap_buffers(engine, setting=setting, others=others)
    except BaseException:
        # Some units have the old plan, some the new one: the model cannot be used.
        engine.handles = [engine.core.model.register_forward_pre_hook(_refuse)]
        raise
    for optimizer in engine.owned.group_names:
        suit_devices(optimizer, device=setting.update_device)


def _checked(engine: EngineParts, *, plan: Plan, mesh: Mesh) -> str:
    """Return the description that ranks compare; refuse a plan that the host's memory does not hold."""
    described = describe_replan(engine, plan=plan, mesh=mesh)
    core = engine.core
    held = {name: unit.placement for name, unit in core.units.items()}
    now = core.followed.plan.mesh or Mesh(shard=dist.get_world_size())
    check_host_room(
        core.followed.spec,
        plan=plan,
        placements=plan.placements(core.units),
        mesh=mesh,
        device=engine.device,
        held_bytes=host_bytes(core.followed.spec, plan=core.followed.plan, placements=held, mesh=now),
    )
    return described


def describe_replan(engine: EngineParts, *, plan: Plan, mesh: Mesh) -> str:
    """Return the description that ranks compare. Raises for a plan that is not possible, before any change."""
    core = engine.core
    core.setting.passes.check_values(_WHAT)
    if core.state.is_in_step:
        raise InvalidModel(
            f"{_WHAT} in the middle of a step: a forward has run whose backward is not over; call it after "
            "loss.backward(), or after the step"
        )
    before, after = (replace(one, compile=one.compiler) for one in (engine.core.followed.plan, plan))
    for name in _FIXED:
        then, now = getattr(before, name), getattr(after, name)
        if then != now:
            raise InvalidPlan(
                f"{_WHAT} with {name} = {now!r}, but the model was prepared with {then!r}: it changes where "
                "things live and when they move, not what is computed; save a checkpoint and prepare again"
            )
    trait = fixed_by(engine, plan)
    if trait:
        raise InvalidModel(f"{_WHAT} with {trait}: save a checkpoint and prepare the model again")
    placements = check_plan(plan, spec=core.followed.spec, mesh=mesh, device=engine.device)
    if plan.dynamic and core.executor.holds_grads:
        raise InvalidPlan(f"{_WHAT} with dynamic = true in the middle of an accumulation: do it after the step")
    if core.executor.holds_slices:
        raise InvalidPlan(
            f"{_WHAT} in the middle of an accumulation with across = {core.followed.plan.across!r}, of whose gradients "
            "each rank has a slice: do it after the step, or set accumulate_reduced = true"
        )
    sharded = {
        name: placements[unit.name].optim.is_sharded
        for unit in core.units.values()
        for flat in unit.flats
        for name in flat.names
    }
    for optimizer in engine.owned.group_names:
        engine.owned.check(optimizer, sharded=sharded)
        check_streamed(optimizer, plan=plan)
    _settle(engine)
    return "\n".join(f"{name} = {value}" for name, value in plan.to_dict().items())


def fixed_by(engine: EngineParts, plan: Plan) -> str:
    """Return the trait of a model that keeps it under its current plan; "" if `plan` may replace it."""
    traits = {
        "parameters that are OWNED (stepped whole by one rank each)": bool(
            engine.owned.matrices.of(None) or plan.owned
        ),
        "an optimizer of blocks of elements": engine.core.setting.alignment != ALIGNMENT,
        "weights of which a module keeps the memory (bitsandbytes int8)": any(
            flat.full.followed for flat in engine.core.flats
        ),
    }
    return next((trait for trait, found in traits.items() if found), "")


def _settle(engine: EngineParts) -> None:
    """Wait for all communication, and copy values that users have written to where they belong."""
    engine.core.wait_gathers()
    engine.guards.managed.check(thorough=True)
    announce(engine.core.setting.events.values_read, False)
    engine.guards.managed.writes.follow_grads()
    engine.core.setting.land()


def _swap_buffers(engine: EngineParts, *, setting: CoreSetting, others: StatesAndGrads) -> None:
    before, plan = engine.core, setting.plan
    placements = plan.placements(before.units)
    held = before.executor.take_held()
    engine.guards.managed.writes.release()
    for unit in before.units.values():
        wake(unit.params())
    numbers = {id(flat): number for number, flat in enumerate(engine.core.flats)}
    flats: dict[str, list[FlatParams]] = {}
    for unit_spec in _smaller_first(before, placements=placements, setting=setting):
        unit, flats[unit_spec.name] = before.units[unit_spec.name], []
        for old in unit.flats:
            new = make_flat(
                list(old.params), unit=unit.name, spec=old.spec, placement=placements[unit.name], setting=setting
            )
            new.lay_out()
            move(engine, numbers[id(old)], new, others=others)
            flats[unit.name].append(new)
    units = {
        name: Unit(name, module=unit.module, placement=placements[name], flats=flats[name], setting=setting)
        for name, unit in before.units.items()
    }
    guard_units(setting.events)
    core = Core(before.model, units=units, setting=setting)
    core.evaluation.patience_seconds = before.evaluation.patience_seconds
    past = engine.guards
    guards = Guards(core, inputs=past.inputs, options=past.options, compare_every=past.replicas.every)
    core.setting.land()
    for unit in units.values():
        unit.settle()
    core.resume(before)
    guards.resume(past)
    if held:
        core.executor.hold(held)
    engine.core, engine.guards = core, guards
    engine.owned.follow_core(core)
    engine.attach()
    engine.wrap()
    distribute(core)
    write_records_of(engine)


def _smaller_first(before: Core, *, placements: dict[str, Placement], setting: CoreSetting) -> list[UnitSpec]:
    """Sort the units by growth, so that a rank never holds more than the larger of both plans."""

    def growth(unit: UnitSpec) -> float:
        share = _held_share(placements[unit.name], setting.groups.mesh)
        share -= _held_share(before.units[unit.name].placement, before.setting.groups.mesh)
        return share * sum(param.num_bytes for param in unit.params)

    return sorted(before.followed.spec.units, key=growth)


def _held_share(placement: Placement, mesh: Mesh) -> float:
    """Return a rank's bytes of parameters, gradients and two states, in multiples of the parameters' bytes."""
    kinds = (placement.params, placement.grads, placement.optim, placement.optim)
    return sum(1 / mesh.num_parts(kind.axes) for kind in kinds)


def _refuse(module: nn.Module, inputs: Any) -> None:
    raise InvalidModel("shardwise.replan has failed on this model, which cannot be used: resume from a checkpoint")
