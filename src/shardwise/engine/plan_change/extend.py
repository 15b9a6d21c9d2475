"""`extend`: takes over the new parameters of a prepared model that was changed (adapters added, a head replaced).

Buffers that still have all their parameters stay unchanged, and so does their optimizer state. New parameters get
separate buffers, with rank 0's values. A buffer that has lost some of its parameters is laid out again for the others,
one buffer at a time; so is one without masters if any of its parameters is trained now.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.comm.groups.agreement import agree
from shardwise.engine.core.assembly import make_flat
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.unit import Unit
from shardwise.engine.engine import EngineParts, engine_of
from shardwise.engine.guards.description import check_precision, describe
from shardwise.engine.guards.guard import wake
from shardwise.engine.guards.refuse import check_tensor
from shardwise.engine.optimizer.allocate import suit_devices
from shardwise.engine.optimizer.unsharded_state import own_states, unsharded_states
from shardwise.program.buffers import FlatSpec, flat_specs
from shardwise.program.spec import ModelSpec, TensorSpec
from shardwise.program.units import model_spec, unit_modules

_NAME = "shardwise.extend(model)"


def extend(model: nn.Module) -> None:
    """Take over the parameters that were added to a prepared model (adapters, a new head). Collective.

        model.head = nn.Linear(width, 10)
        shardwise.extend(model)
        optimizer.add_param_group({"params": model.head.parameters()})

    New parameters get rank 0's values. Others keep their values and optimizer state; removed ones leave their
    optimizer. Gradients are cleared. A base model that was frozen in bf16 has no fp32 masters: after
    requires_grad_(True) it gets them here.
    """
    engine = engine_of(model)
    engine.core.setting.passes.check_values(_NAME)
    engine.check_between_steps(what=_NAME)
    agree(lambda: _description(model, engine), what="models")
    model.zero_grad()
    engine.core.wait_gathers()
    announce(engine.core.setting.events.values_read, False)
    for unit in engine.core.units.values():
        # A forward without a backward has left units gathered.
        unit.free()
    spec = _spec_now(model, engine)
    with unguarded():
        _Extension(model, engine, spec=spec).run()
    if engine.graphs is not None:
        engine.graphs.renew()


def _description(model: nn.Module, engine: EngineParts) -> str:
    """Return the description that ranks compare. Raises if the model cannot be extended, before it is changed."""
    plan, known = engine.core.followed.plan, _known(engine)
    if engine.averages:
        raise InvalidModel(f"{_NAME} with a shardwise.EMA of the model, which is of the old parameters: make it after")
    if engine.owned.matrices.of(None):
        raise InvalidModel(
            f"{_NAME} with parameters that are OWNED (stepped whole by one rank each), whose slices would move: change "
            "the model before shardwise.prepare, or use an optimizer that updates each element by itself"
        )
    modules = unit_modules(model, policy=plan.units)
    units = {name: unit.module for name, unit in engine.core.units.items()}
    if modules != units:
        name = next(iter(set(modules) ^ set(units)), None) or next(n for n in units if modules[n] is not units[n])
        raise InvalidModel(f"{_NAME}: unit {name} was added, taken away or replaced; prepare such a model after that")
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            check_tensor(name, parameter)
            if parameter.is_meta:
                raise InvalidModel(f"{_NAME}: {name} is on the meta device; give it values first")
    check_precision(model, plan=plan)
    return describe(model, spec=_spec_now(model, engine), plan=plan)


def _known(engine: EngineParts) -> dict[int, tuple[FlatParams, int]]:
    return {id(parameter): (flat, index) for flat in engine.core.flats for index, parameter in enumerate(flat.params)}


def _spec_now(model: nn.Module, engine: EngineParts) -> ModelSpec:
    """Return the spec of the changed model; known parameters keep theirs, except for their names."""
    before = engine.core.followed.spec
    known, by_name = _known(engine), {param.name: param for unit in before.units for param in unit.params}
    parameters = dict(model.named_parameters())

    def now(found: TensorSpec, *, unit: str) -> TensorSpec:
        place = known.get(id(parameters[found.name]))
        if place is None:
            # Layers that are added later multiply in bf16.
            return replace(found, linear=False)
        flat, index = place
        if not any(flat is own for own in engine.core.units[unit].flats):
            raise InvalidModel(f"{_NAME}: {found.name} is shared between units that did not share it before")
        kept = replace(by_name[flat.names[index]], name=found.name, aliases=found.aliases)
        return replace(kept, trainable=True, switched=False) if flat.spec.unstepped and found.trainable else kept

    fresh = model_spec(model, policy=engine.core.followed.plan.units)
    return replace(
        before,
        units=tuple(
            replace(old, params=tuple(now(param, unit=unit.name) for param in unit.params), buffers=unit.buffers)
            for old, unit in zip(before.units, fresh.units, strict=True)
        ),
    )


class _Extension:
    """One change of a model."""

    def __init__(self, model: nn.Module, engine: EngineParts, *, spec: ModelSpec) -> None:
        self._model, self._engine, self._spec = model, engine, spec
        self._parameters = dict(model.named_parameters())
        self._known = _known(engine)
        # New names of the parameters that still exist, by old name.
        self._names = {
            flat.names[index]: name
            for name, parameter in self._parameters.items()
            if id(parameter) in self._known
            for flat, index in (self._known[id(parameter)],)
        }

    @torch.no_grad()
    def run(self) -> None:
        engine, core = self._engine, self._engine.core
        core.hooks.detach()
        engine.guards.detach()
        for handle in engine.handles:
            handle.remove()
        engine.owned.follow(self._names)
        changed = []
        for unit, spec in zip(core.units.values(), self._spec.units, strict=True):
            flats = self._flats_of(unit, spec.params)
            if flats != unit.flats:
                unit.hold(flats)
                changed.append(unit)
        self._move_buffers()
        for unit in changed:
            unit.settle()
        # The next step learns the order of units again.
        core.relearn(self._spec)
        engine.guards.cover()
        engine.owned.rewrite()
        for optimizer in engine.owned.group_names:
            # Its groups hold the new slices by now.
            suit_devices(optimizer, device=engine.core.setting.update_device)
        engine.attach()

    def _flats_of(self, unit: Unit, params: tuple[TensorSpec, ...]) -> list[FlatParams]:
        """Return the buffers of a unit: the previous ones, followed by those of new parameters."""
        flats = []
        for flat in unit.flats:
            left = [param for param in params if self._place(param) is flat]
            stays = len(left) == len(flat.params) and not (flat.spec.unstepped and any(one.trainable for one in left))
            # In their order in the buffer.
            left.sort(key=lambda param: self._known[id(self._parameters[param.name])][1])
            named = (replace(param, name=self._names.get(param.name, param.name)) for param in flat.spec.params)
            flat.describe(replace(flat.spec, params=tuple(named)))
            if stays:
                flats.append(flat)
            else:
                flats += self._laid_out_again(flat, left, unit=unit)
        new = [param for param in params if self._place(param) is None]
        return flats + [self._filled(spec, unit=unit) for spec in self._specs(new, unit=unit)]

    def _specs(self, params: list[TensorSpec], *, unit: Unit) -> tuple[FlatSpec, ...]:
        return flat_specs(
            replace(self._spec.unit(unit.name), params=tuple(params)), plan=self._engine.core.followed.plan
        )

    def _place(self, param: TensorSpec) -> FlatParams | None:
        place = self._known.get(id(self._parameters[param.name]))
        return place[0] if place is not None else None

    def _make(self, spec: FlatSpec, *, unit: Unit) -> FlatParams:
        params = [self._parameters[param.name] for param in spec.params]
        flat = make_flat(params, unit=unit.name, spec=spec, placement=unit.placement, setting=self._engine.core.setting)
        flat.lay_out()
        return flat

    def _filled(self, spec: FlatSpec, *, unit: Unit) -> FlatParams:
        """Return a buffer of new parameters, with rank 0's values."""
        flat = self._make(spec, unit=unit)
        for index, parameter in enumerate(flat.params):
            value = parameter.detach().to(self._engine.device).contiguous()
            dist.broadcast(value, src=0, group=self._engine.core.setting.groups.world.handle)
            flat.fill(index, value)
        self._take_in(flat)
        return flat

    def _laid_out_again(self, old: FlatParams, left: list[TensorSpec], *, unit: Unit) -> list[FlatParams]:
        """Return new buffers for the parameters that are left of an old one, and move their optimizer state."""
        if not left:
            self._forget_states(old)
            return []
        values = dict(zip(map(id, old.params), old.full.views_of(old.full_master()), strict=True))
        optimizers = list(self._engine.owned.group_names)
        states = [unsharded_states(optimizer, flats=[old], matrices=()) for optimizer in optimizers]
        # Before the new states are set: an optimizer may step the same replicated parameter before and after.
        self._forget_states(old)
        flats = [self._make(spec, unit=unit) for spec in self._specs(left, unit=unit)]
        for flat in flats:
            for index, parameter in enumerate(flat.params):
                flat.fill(index, values[id(parameter)])
            for optimizer, unsharded in zip(optimizers, states, strict=True):
                kept = {name: unsharded[name] for name in flat.names if name in unsharded}
                optimizer.state.update(own_states(kept, flats=[flat], matrices=()))
            self._take_in(flat)
        return flats

    def _take_in(self, flat: FlatParams) -> None:
        """Make the module's parameters views of a buffer, and register its slices for optimizers."""
        wake(flat.params)
        for index, parameter in enumerate(flat.params):
            flat.attach(index, parameter)
            self._engine.owned.cover(flat, index, parameter)

    def _forget_states(self, flat: FlatParams) -> None:
        for optimizer in self._engine.owned.group_names:
            for part in flat.master.owned:
                optimizer.state.pop(part.parameter, None)

    def _move_buffers(self) -> None:
        """Move the buffers of new modules to the device; rank 0 broadcasts buffers before the next step, as always."""
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._engine.device:
                    module._buffers[name] = buffer.to(self._engine.device)
