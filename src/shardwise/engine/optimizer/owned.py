"""The optimizers of a prepared model: checks, owned matrices and state dicts, in addition to the core's slices.

An optimizer that was not given to `prepare` is recognised at its first step by its parameters (any_step.py). Parameters
whose update reads more than one element at a time are stepped unsharded, by the ranks that own them.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan
from shardwise.comm.groups.agreement import agree, meet
from shardwise.engine.core.core import Core
from shardwise.engine.core.edited_values import editing
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.optimizer_slices import OptimizerSlices, StepClosure
from shardwise.engine.core.step_errors import not_reduced_yet
from shardwise.engine.optimizer.allocate import suit_devices
from shardwise.engine.optimizer.backward_update import BackwardUpdate
from shardwise.engine.optimizer.known import (
    Stepped,
    check_optimizer,
    check_reach,
    describe_optimizer,
    judge,
    name_of,
    needs_owner,
    warn_owned,
)
from shardwise.engine.optimizer.matrices import OwnedMatrices
from shardwise.engine.optimizer.numbered_state import load_numbered, numbered_state
from shardwise.engine.optimizer.scaler import called_by_torchs, foreign_scaler
from shardwise.engine.optimizer.streamed_update import StreamedUpdate, check_streamed
from shardwise.engine.optimizer.unsharded_state import named_states, own_states, unsharded_states
from shardwise.plan.patterns import short_patterns


class OwnedParameters(OptimizerSlices):
    """The optimizers of a prepared model.

    matrices   the parameters that are stepped unsharded
    numbers    each optimizer's number, in the order in which all ranks have adopted them
    """

    def __init__(self, core: Core, *, any_optimizer: bool) -> None:
        super().__init__(core)
        self.matrices = OwnedMatrices(core)
        self._update_apart(core)
        self.numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_adopted = 0
        self._stepped: dict[int, Stepped] = {}
        # Whether an optimizer steps any slices.
        self._steps_slices: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._any_optimizer = any_optimizer
        # Those whose param groups hold the model's own parameters for a moment.
        self._showing: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def _update_apart(self, core: Core) -> None:
        """Have states updated outside of the optimizers' own steps, where the plan says so."""
        self.streamed = StreamedUpdate(core)
        if core.followed.plan.updates_in_backward:
            BackwardUpdate(core, optimizers=self.group_names, streamed=self.streamed)

    def follow_core(self, core: Core) -> None:
        """Use the core of the model's new plan."""
        self.core = core
        self.matrices = OwnedMatrices(core)
        self._update_apart(core)

    def cover(self, flat: FlatParams, index: int, parameter: nn.Parameter) -> None:
        super().cover(flat, index, parameter)
        self._stepped[id(parameter)] = Stepped(sharded=flat.placement.optim.is_sharded, dtype=flat.master_dtype)

    def follow(self, names: Mapping[str, str]) -> None:
        """Rename the parameters (old → new name) and forget those that are not in `names`."""
        for key in [key for key, name in self._names.items() if name not in names]:
            del self._owned[key], self._stepped[key], self._names[key]
        self._names = {key: names[name] for key, name in self._names.items()}
        for groups in self.group_names.values():
            for held in groups:
                held[:] = [names[name] for name in held if name in names]

    def rewrite(self) -> None:
        """Fill all param groups again from this rank's slices."""
        slices = {name: self._owned[key] for key, name in self._names.items()}
        in_slices = {self._names[key] for key, how in self._stepped.items() if how.sharded}
        for optimizer, groups in self.group_names.items():
            for group, held in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = [owned for name in held if (owned := slices[name]) is not None]
            self._steps_slices[optimizer] = any(name in in_slices for held in groups for name in held)

    def check(self, optimizer: Optimizer, *, sharded: Mapping[str, bool]) -> None:
        """Refuse an adopted optimizer that cannot step slices of the parameters that would be `sharded`, by name."""
        if self._any_optimizer or not self.core.flats:
            return
        stepped: dict[int, Stepped] = {}
        for group, names in zip(optimizer.param_groups, self.group_names[optimizer], strict=True):
            # If this rank does not hold a part of each, they are in slices already.
            now = [sharded[name] for name in names] if len(names) == len(group["params"]) else None
            for number, parameter in enumerate(group["params"]):
                stepped[id(parameter)] = Stepped(sharded=now is not None and now[number], dtype=parameter.dtype)
        verdicts = judge(optimizer, stepped=stepped, device=self.core.flats[0].stepped_on)
        if any(needs_owner(verdict, alignment=self.core.setting.alignment) for verdict in verdicts.values()):
            raise InvalidPlan(
                f"{name_of(optimizer)} looks at more than an element in its update, and under this plan it would step "
                "slices: save a checkpoint and prepare the model again"
            )

    def replace_slices(self, owned: Mapping[str, nn.Parameter | None], *, sharded: bool) -> None:
        """Replace this rank's slices of these parameters (None: it has none) in all optimizers."""
        for key, name in self._names.items():
            if name in owned:
                self._owned[key], self._stepped[key] = owned[name], replace(self._stepped[key], sharded=sharded)
        self.rewrite()

    def in_slices(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps, or will step, slices of the model."""
        if self.adopted(optimizer):
            return self._steps_slices[optimizer]
        held = (self._stepped.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return any(how is not None and how.sharded for how in held)

    def parts(self) -> set[int]:
        """Return the ids of this rank's slices of parameters whose other slices are on other ranks."""
        if self.core.setting.groups.reduce.size == 1:
            return set()
        return {id(part) for key, part in self._owned.items() if self._stepped[key].sharded}

    def concerns(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._owned for group in optimizer.param_groups for p in group["params"])

    def adopt_on_all_ranks(self, optimizer: Optimizer) -> None:
        """Adopt an optimizer after comparing it with those of the other ranks. Collective."""
        owned: list[str] = []

        def describe() -> str:
            check_optimizer(optimizer, stepped=self._stepped)
            check_streamed(optimizer, plan=self.core.followed.plan)
            owned.extend(self._to_own(optimizer))
            return "\n".join((describe_optimizer(optimizer, names=self._names), *(f"OWNED {name}" for name in owned)))

        if not self.adopted(optimizer):
            agree(describe, what="optimizers")
            self.adopt(optimizer, owned=owned)

    def _to_own(self, optimizer: Optimizer, *, first_group: int = 0) -> list[str]:
        """Return the parameters that must be stepped unsharded: their update reads more than one element at a time."""
        if self._any_optimizer or not self.core.flats:
            return []
        alignment, stepped_on = self.core.setting.alignment, self.core.flats[0].stepped_on
        verdicts = judge(optimizer, stepped=self._stepped, device=stepped_on, first_group=first_group)
        check_reach(optimizer, verdicts=verdicts)
        found = [self._names[key] for key, verdict in verdicts.items() if needs_owner(verdict, alignment=alignment)]
        if found and dist.get_rank() == 0:
            warn_owned(optimizer, num_owned=len(found), num_held=len(verdicts))
        return found

    def adopt(self, optimizer: Optimizer, *, owned: Sequence[str] = ()) -> None:
        """Rewrite the param groups of a checked optimizer in place, so that schedulers keep working.

        owned   the names of parameters that it must step unsharded; the plan may have more
        """
        self._own(owned)
        self.numbers[optimizer] = self._num_adopted
        self._num_adopted += 1
        # Some optimizers allocate state before their first step.
        made = {self._names[id(parameter)]: state for parameter, state in optimizer.state.items()}
        optimizer.state.clear()
        super().adopt(optimizer)
        optimizer.state.update(own_states(made, flats=self.core.flats, matrices=self.matrices.of(optimizer)))
        suit_devices(optimizer, device=self.core.setting.update_device)
        held_weakly = weakref.ref(optimizer)
        optimizer.add_param_group = partial(self._add_param_group, held_weakly)  # type: ignore[method-assign]
        optimizer.state_dict = partial(self._state_dict, held_weakly)  # type: ignore[method-assign]
        optimizer.load_state_dict = partial(self._load_state_dict, held_weakly)  # type: ignore[method-assign]
        for switch in ("train", "eval"):
            if callable(getattr(optimizer, switch, None)):
                setattr(optimizer, switch, partial(self._switch, held_weakly, switch))

    def _own(self, names: Sequence[str]) -> None:
        """From the next update on, have each of these parameters stepped unsharded, by the rank that owns it."""
        core = self.core
        new = [name for name in names if not core.followed.plan.owns(name)]
        if not new:
            return
        if core.executor.holds_grads:
            raise not_reduced_yet()
        every = [name for flat in core.flats for name in flat.names]
        followed = core.followed
        owned = (*followed.plan.owned, *short_patterns(new, among=every))
        followed.follow(followed.spec, plan=replace(followed.plan, owned=owned))

    def _switch(self, held: "weakref.ref[Optimizer]", switch: str) -> None:
        """Run `train` or `eval` of a schedule-free optimizer, which exchanges the parameters' values. Collective."""
        optimizer = held()
        assert optimizer is not None
        with editing(self.core):
            getattr(type(optimizer), switch)(optimizer)

    def _add_param_group(self, held: "weakref.ref[Optimizer]", param_group: dict[str, Any]) -> None:
        """Run the optimizer's own `add_param_group`, for parameters of the model that it does not step yet."""
        optimizer = held()
        assert optimizer is not None
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        stepped = {name for group in self.group_names[optimizer] for name in group}
        for parameter in (entry[1] if isinstance(entry, tuple) else entry for entry in params):
            if self._name(parameter) in stepped:
                raise InvalidPlan(f"add_param_group with {self._name(parameter)}: it is in another group")
        with self.showing_parameters(optimizer):
            type(optimizer).add_param_group(optimizer, {**param_group, "params": params})

    def _name(self, parameter: Tensor) -> str:
        """Return the name of a parameter of the model."""
        if id(parameter) not in self._names:
            what = f"a parameter of shape {tuple(parameter.shape)}"
            raise InvalidPlan(f"add_param_group with {what}: it is not the prepared model's")
        return self._names[id(parameter)]

    @contextmanager
    def showing_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Show the model's own parameters in the param groups. The block may add groups, or replace them."""
        before = self.group_names[optimizer]
        if optimizer in self._showing:
            yield
            return
        parameters = {self._names[id(one)]: one for one in self._known if id(one) in self._names}
        for group, names in zip(optimizer.param_groups, before, strict=True):
            group["params"][:] = [parameters[name] for name in names]
        groups = list(optimizer.param_groups)
        self._showing.add(optimizer)
        try:
            yield
            self._own(self._to_own_now(optimizer, before=before))
        except BaseException:
            optimizer.param_groups[:] = groups
            raise
        finally:
            self._showing.discard(optimizer)
            self.group_names[optimizer] = []
            for group in optimizer.param_groups:
                self._rewrite(group, optimizer=optimizer)

    def _to_own_now(self, optimizer: Optimizer, *, before: Sequence[Sequence[str]]) -> list[str]:
        """Return what must be stepped unsharded of the parameters that have come into the groups."""
        now = [[self._name(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if now == before:
            return []
        return self._to_own(optimizer, first_group=len(before) if now[: len(before)] == before else 0)

    def _stepped_for(
        self, parameters: list[nn.Parameter], *, names: list[str], optimizer: Optimizer
    ) -> list[nn.Parameter | None]:
        """Return what is stepped for each parameter on this rank: a slice, a matrix that it owns, or nothing."""
        sharded = [self._stepped[id(parameter)].sharded for parameter in parameters]
        self._steps_slices[optimizer] = any(sharded) or self._steps_slices.get(optimizer, False)
        plan = self.core.followed.plan
        held = {matrix.name for matrix in self.matrices.of(optimizer)}
        in_slices = [name for name, is_sharded in zip(names, sharded, strict=True) if is_sharded]
        self.matrices.own(optimizer, [name for name in in_slices if plan.owns(name) and name not in held])
        matrices = {matrix.name: matrix.unsharded for matrix in self.matrices.of(optimizer)}
        slices = super()._stepped_for(parameters, names=names, optimizer=optimizer)
        return [matrices.get(name, part) for name, part in zip(names, slices, strict=True)]

    def _zero_grad(self, held: "weakref.ref[Optimizer]", set_to_none: bool = True) -> None:
        """Clear also the gradients in slices of owned matrices."""
        optimizer = held()
        assert optimizer is not None
        if not set_to_none:
            self.matrices.zero_grads(optimizer)
            self.streamed.wait()
        super()._zero_grad(held, set_to_none)

    def _state_dict(self, held: "weakref.ref[Optimizer]") -> dict[str, Any]:
        """Return the state dict of a plain optimizer: full tensors, by number. Collective where states are sharded."""
        optimizer = held()
        assert optimizer is not None
        if any(flat.placement.optim.is_sharded for flat in self.core.flats):
            meet("optimizer.state_dict", limit_seconds=self.core.followed.limit_seconds)
        self.streamed.settle()
        states = unsharded_states(optimizer, flats=self.core.flats, matrices=self.matrices.of(optimizer))
        return numbered_state(optimizer, states=states, names=self.group_names[optimizer])

    def _load_state_dict(self, held: "weakref.ref[Optimizer]", state_dict: Mapping[str, Any]) -> None:
        """Load this rank's slices of full states, given by torch's numbers or by full names."""
        optimizer = held()
        assert optimizer is not None
        self.streamed.settle()
        states = named_states(state_dict, groups=self.group_names[optimizer])
        own = own_states(states, flats=self.core.flats, matrices=self.matrices.of(optimizer))
        load_numbered(optimizer, state_dict, states=states, own=own, names=self.group_names[optimizer])

    def before_step(self, optimizer: Optimizer | None) -> None:
        """Refuse torch's GradScaler: each rank's would read its own slices only, and skip a step that others take."""
        assert optimizer is not None
        if self._steps_slices[optimizer] and called_by_torchs():
            raise foreign_scaler()
        if self.core.followed.plan.owned:
            self.matrices.begin_step(optimizer)
        super().before_step(optimizer)
        if self.core.setting.host is not None:
            self.streamed.begin_step(optimizer)

    def _end_step(self, optimizer: Optimizer, closure: StepClosure) -> None:
        if self.core.setting.host is not None:
            self.streamed.end_step(optimizer)
            self.streamed.release_first_states()
        super()._end_step(optimizer, closure)
