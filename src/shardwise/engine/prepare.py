"""`prepare_on_ours`: makes an ordinary model and optimizer run a plan. They stay the same objects."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan
from shardwise.comm.groups.agreement import check_alike, together
from shardwise.comm.groups.collectives import BackendCollectives, Collectives
from shardwise.comm.groups.groups import mesh_groups
from shardwise.comm.job.join import join_job
from shardwise.comm.watch.watch import check_watch_seconds, watch_over
from shardwise.engine.activations.tiled import check_tiles
from shardwise.engine.carry import carry_engine
from shardwise.engine.checked_plan import check_plan
from shardwise.engine.core.assembly import make_core
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.precision import check_kept, torch_dtype, warn_upcast
from shardwise.engine.fp8.fp8_bytes import Fp8Bytes
from shardwise.engine.guards.carried import broadcast_carried, follow_carried
from shardwise.engine.guards.description import (
    advise_on_segments,
    asked_device,
    check_gradients,
    describe,
    warn_crossing,
    warn_hardly_cut,
)
from shardwise.engine.guards.first_inputs import FirstInputs
from shardwise.engine.guards.guard import guard_units
from shardwise.engine.guards.guards import Guards
from shardwise.engine.guards.other_views import check_views
from shardwise.engine.guards.refuse import check_model
from shardwise.engine.guards.replicas import check_compare_every
from shardwise.engine.guards.same_order import OptimizerOptions
from shardwise.engine.guards.taken_apart import take_apart
from shardwise.engine.last_issued import write_records_of
from shardwise.engine.offload.host_room import check_host_room
from shardwise.engine.offload.transfer import host_copies
from shardwise.engine.optimizer.any_step import watch_optimizers
from shardwise.engine.optimizer.known import (
    Stepped,
    check_optimizer,
    check_reach,
    describe_optimizer,
    judge,
    name_of,
    needs_owner,
    slice_alignment,
    warn_owned,
)
from shardwise.engine.optimizer.owned import OwnedParameters
from shardwise.engine.optimizer.reach import Verdict
from shardwise.engine.optimizer.streamed_update import check_streamed
from shardwise.engine.our_engine import Engine
from shardwise.engine.out_of_memory import explain_out_of_memory
from shardwise.engine.prepared.prepared_module import become_prepared
from shardwise.engine.workspaces import take_workspaces
from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.buffers import param_dtypes
from shardwise.program.spec import ModelSpec
from shardwise.program.units import CutModel, cut_model
from shardwise.program.units.scripted import allow_hooks

AnyOptimizer = TypeVar("AnyOptimizer", Optimizer, None, list[Optimizer])


def prepare_on_ours(
    model: nn.Module,
    optimizer: AnyOptimizer,
    plan: Plan,
    *,
    device: torch.device | str | None,
    any_optimizer: bool,
    collectives: Collectives | None,
    watch_seconds: float,
    compare_every: int,
    weights: Mapping[str, Tensor] | None,
    predict: Callable[..., Mapping[str, int]],
) -> tuple[nn.Module, AnyOptimizer]:
    """Make `model` and `optimizer` run `plan` on our engine; return the same two objects. Collective.

    shardwise.prepare documents the arguments; `predict` is for out-of-memory errors. A model on the meta device is
    filled straight into shards. An optimizer that cannot step slices (optimizer/reach.py tests it on small tensors)
    steps each parameter unsharded, on the rank that owns it.
    """
    optimizers = _listed(optimizer)
    chosen = join_job(asked_device(model, device=device))
    mesh = plan.mesh or Mesh(shard=dist.get_world_size())

    def checked() -> tuple[CutModel, dict[str, Verdict]]:
        check_model(model, plan=plan)
        check_views(model)
        units = cut_model(model, policy=plan.units)
        placements = _check(model, units.spec, plan=plan, mesh=mesh, device=chosen)
        check_watch_seconds(watch_seconds)
        check_compare_every(compare_every)
        verdicts = _judge(
            model, optimizers, spec=units.spec, placements=placements, plan=plan, device=chosen, skips=any_optimizer
        )
        check_gradients(model)
        return units, verdicts

    units, verdicts = together(checked)
    described = _described(model, optimizers, spec=units.spec, plan=plan, verdicts=verdicts)
    described += f"\nwatch_seconds = {watch_seconds:g}\ncompare_every = {compare_every}"
    if weights is not None:
        described += "\nweights = " + ", ".join(sorted(weights))
    check_alike(described, what="plans, models or optimizers")
    take_workspaces(chosen)
    if together(partial(take_apart, model)):
        # There are other parameters now.
        units = cut_model(model, policy=plan.units)
    allow_hooks(model)
    setting = CoreSetting(
        spec=units.spec,
        plan=plan,
        groups=mesh_groups(mesh),
        collectives=collectives or _collectives(plan),
        device=chosen,
        host=host_copies(plan, device=chosen),
        narrow=Fp8Bytes,
        alignment=slice_alignment(verdicts),
    )
    owned = _owned_names(verdicts)
    if dist.get_rank() == 0:
        warn_upcast(setting.spec, plan=plan)
        _warn_owned(model, optimizers, owned=owned)
    warn_hardly_cut(setting.spec, plan=plan, mesh=mesh)
    warn_crossing(plan, mesh=mesh)
    advise_on_segments(plan, spec=setting.spec, mesh=mesh, device=chosen)
    engine = _engine(
        model,
        modules=units.modules,
        setting=setting,
        any_optimizer=any_optimizer,
        compare_every=compare_every,
        weights=weights,
    )
    for one in optimizers:
        engine.owned.adopt(one, owned=owned)
    engine.predict = predict
    together(engine.attach)
    together(engine.wrap)
    carry_engine(model, engine)
    become_prepared(model)
    explain_out_of_memory(model)
    _watch(engine, limit_seconds=watch_seconds)
    write_records_of(engine)
    return model, optimizer


def _warn_owned(model: nn.Module, optimizers: Sequence[Optimizer], *, owned: Collection[str]) -> None:
    """Warn about optimizers that step whole parameters, each on the rank that owns it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        num_owned = len(set(owned).intersection(held))
        if num_owned:
            warn_owned(optimizer, num_owned=num_owned, num_held=len(held))


def _watch(engine: Engine, *, limit_seconds: float) -> None:
    """Have the watchdog end the job when a collective does not end."""
    if limit_seconds:
        # An error that names the way out comes before the watchdog ends the job.
        engine.core.evaluation.patience_seconds = 0.9 * limit_seconds
    watch_over(
        engine,
        limit_seconds=limit_seconds,
        waits_on_host=engine.device.type == "cpu",
        issues=partial(_history, weakref.ref(engine)),
    )


def _history(held: "weakref.ref[Engine]") -> dict[int, dict[str, list[str]]]:
    engine = held()
    return {} if engine is None else engine.guards.same_order.history()


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> Sequence[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer


def _engine(
    model: nn.Module,
    *,
    modules: Mapping[str, nn.Module],
    setting: CoreSetting,
    any_optimizer: bool,
    compare_every: int,
    weights: Mapping[str, Tensor] | None,
) -> Engine:
    """Give the model its buffers and its core, and attach the other parts to the core."""
    broadcast_carried(model, device=setting.device, group=setting.groups.world.handle)
    guard_units(setting.events)
    core, places = make_core(model, modules=modules, setting=setting, weights=weights, on_filled=follow_carried)
    owned = OwnedParameters(core, any_optimizer=any_optimizer)
    watch_optimizers(owned)
    options = OptimizerOptions(owned.numbers)
    guards = Guards(core, inputs=FirstInputs(), options=options, compare_every=compare_every)
    for unit in core.units.values():
        unit.settle()
    for flat, index, parameter in places:
        owned.cover(flat, index, parameter)
    return Engine(core=core, guards=guards, owned=owned)


def _check(model: nn.Module, spec: ModelSpec, *, plan: Plan, mesh: Mesh, device: torch.device) -> dict[str, Placement]:
    """Return the placement of each unit; refuse a plan that cannot run with this model, before that is changed."""
    placements = check_plan(plan, spec=spec, mesh=mesh, device=device)
    check_host_room(spec, plan=plan, placements=placements, mesh=mesh, device=device)
    check_kept(model, spec=spec, plan=plan)
    check_tiles(model, tile=plan.tile, units=placements)
    for pattern in unmatched(plan.owned, (param.name for unit in spec.units for param in unit.params)):
        raise InvalidPlan(f"owned: {pattern} matches no parameter of the model")
    return placements


def _judge(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    spec: ModelSpec,
    placements: Mapping[str, Placement],
    plan: Plan,
    device: torch.device,
    skips: bool,
) -> dict[str, Verdict]:
    """Return the reach of the optimizers' updates by the names of their parameters; refuse one that cannot step them.

    `skips`: without the test of the reach; nothing is returned then.
    """
    parameters, verdicts = dict(model.named_parameters()), dict[str, Verdict]()
    stepped = {
        id(parameters[param.name]): Stepped(
            sharded=placements[unit.name].optim.is_sharded, dtype=torch_dtype(param_dtypes(param, plan=plan)[1])
        )
        for unit in spec.units
        for param in unit.params
    }
    for optimizer in optimizers:
        check_optimizer(optimizer, stepped=stepped)
        if not skips:
            on_host = plan.offload_states and plan.offload_update == "host"
            found = judge(optimizer, stepped=stepped, device=torch.device("cpu") if on_host else device)
            check_reach(optimizer, verdicts=found)
            verdicts |= {name: found[id(p)] for name, p in parameters.items() if id(p) in found}
            _check_owned(optimizer, plan=plan, names=_owned_names(verdicts))
        check_streamed(optimizer, plan=plan)
    return verdicts


def _described(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    spec: ModelSpec,
    plan: Plan,
    verdicts: Mapping[str, Verdict],
) -> str:
    """Describe what ranks must agree on, one thing per line."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = [
        describe(model, spec=spec, plan=plan),
        *(describe_optimizer(optimizer, names=names) for optimizer in optimizers),
        f"slices begin at multiples of {slice_alignment(verdicts)}",
        *(f"OWNED {name}" for name in _owned_names(verdicts)),
    ]
    return "\n".join(lines)


def _check_owned(optimizer: Optimizer, *, plan: Plan, names: tuple[str, ...]) -> None:
    """Refuse an optimizer with OWNED parameters under a plan that cannot have them."""
    try:
        replace(plan, owned=(*plan.owned, *names))
    except InvalidPlan as error:
        raise InvalidPlan(f"{name_of(optimizer)} looks at whole parameters in its update: {error}") from None


def _owned_names(verdicts: Mapping[str, Verdict]) -> tuple[str, ...]:
    """Return the parameters that must be stepped unsharded, each by one rank."""
    alignment = slice_alignment(verdicts)
    return tuple(name for name, verdict in verdicts.items() if needs_owner(verdict, alignment=alignment))


def _collectives(plan: Plan) -> Collectives:
    if plan.collectives == "ring":
        from shardwise.comm.groups.ring import RingCollectives

        return RingCollectives()
    return BackendCollectives()
