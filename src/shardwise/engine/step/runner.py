"""The runner: what happens in a step → the operations of the program.

Two things are kept in order on every rank, each in a process group of its own: gathers (walk.py) and reduces
(queue.py). The first step finds out in which order the units are called (learn.py).
"""

import warnings
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from torch.autograd import Variable

from shardwise.comm.agreement import meet
from shardwise.engine.grads.queue import ReduceQueue
from shardwise.engine.grads.used import UsedFlags
from shardwise.engine.params.unit import Unit
from shardwise.engine.step.learn import FirstForward, Observation, learned
from shardwise.engine.step.pass_state import PassState
from shardwise.engine.step.tape import Tape
from shardwise.engine.step.walk import Walk
from shardwise.errors import InvalidData, InvalidModel
from shardwise.plan import Plan
from shardwise.program import Bucket, Kind, Trigger, build
from shardwise.spec import ROOT, UNANNOUNCED, ModelSpec


class Runner:
    """One model's steps."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        plan: Plan,
        units: dict[str, Unit],
        make_queue: Callable[[Iterable[Bucket]], ReduceQueue],
        make_first_forward: Callable[[], FirstForward],
        gather_seen: Callable[[Observation], list[Observation]],
        broadcast_buffers: Callable[[], None],
        flags: UsedFlags,
        passes: PassState,
        land: Callable[[], None],
        tape: Tape,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.units = units
        self.root = units[ROOT]
        self.tape = tape
        self.make_queue = make_queue
        self.make_first_forward = make_first_forward
        self.gather_seen = gather_seen
        self.broadcast_buffers = broadcast_buffers
        self.flags = flags
        self.passes = passes
        self.land = land
        self.any_sharded = any(unit.sharded for unit in units.values())
        self.queue = make_queue(())
        self.walk = Walk(units, close=self._close, broadcast_buffers=broadcast_buffers)
        # While the order is learned.
        self.first: FirstForward | None = None
        # (unit, call) of this rank's first forward → which of the program's calls that is.
        self.places: dict[tuple[str, int], int] = {}
        # Forwards since the last backward; whether this backward reduces, or leaves that to a later one.
        self.forwards = 0
        self.in_backward = False
        self.reduces = True
        self._told: set[str] = set()

    # Forward

    def recomputing(self) -> bool:
        """Whether this thread runs a backward: then a forward is a recomputation."""
        return torch._C._current_graph_task_id() != -1

    def before_forward(self, unit: Unit) -> None:
        recomputing = self.recomputing()
        if recomputing and torch.is_grad_enabled() and not unit.calls:
            # Its forward ran without gradients, so nothing of the program knows of it.
            raise InvalidModel(
                f"{unit.name} is recomputed by a reentrant checkpoint: say use_reentrant=False in "
                "torch.utils.checkpoint"
            )
        if recomputing:
            self.walk.serve(unit)
            return
        if not torch.is_grad_enabled():
            unit.ensure()
            return
        if unit is self.root:
            self._begin()
        if self.first is not None:
            unit.call = self.first.note_call(unit)
            self.first.want(unit)
        else:
            unit.call = self.walk.place_of_call(unit)
            self.walk.run(unit, Trigger.BEFORE_FORWARD, unit.call)
        self.walk.serve(unit)
        self.tape.record(Kind.FORWARD, unit.name)
        unit.calls += 1

    def after_forward(self, unit: Unit, *, backward: str) -> None:
        """`backward`: how backward will come to this call."""
        if self.recomputing():
            return
        if not torch.is_grad_enabled():
            unit.end_backward()
            return
        if backward == UNANNOUNCED and unit.sharded:
            self._tell(unit)
        if self.first is not None:
            self.first.note_backward(unit, backward)
            if unit is not self.root and unit.placement.reshard_after_forward and backward != UNANNOUNCED:
                unit.free()
        elif backward != UNANNOUNCED or self.spec.unit(unit.name).backward == UNANNOUNCED:
            self.walk.run(unit, Trigger.AFTER_FORWARD, unit.call)

    def _tell(self, unit: Unit) -> None:
        if unit.name not in self._told:
            self._told.add(unit.name)
            warnings.warn(
                f"{unit.name} returns an object in which no tensor can be found, so its parameters stay gathered until "
                "backward is over: return tensors, or tuples, dicts or dataclasses of them",
                stacklevel=2,
            )

    def _begin(self) -> None:
        """A new step; whatever the last one left undone (a backward that raised, or none) is dropped."""
        if self.in_backward:
            if self.queue.holds_grads:
                raise InvalidData(
                    "a backward failed in the middle of an accumulation, so the gradients so far are not whole: call "
                    "optimizer.zero_grad() and begin the step again"
                )
            self._abandon()
        self.queue.drop()
        self.walk.restart()
        self.places = {}
        self.forwards += 1
        for unit in self.units.values():
            unit.begin(self.grad_ready)
        changed = any(unit.trainable != unit.learned_trainable for unit in self.units.values())
        if self.walk.program is None or changed or self.plan.dynamic:
            self._forget_program(changed=changed)
            self.broadcast_buffers()

    def _abandon(self) -> None:
        """A backward raised: what it left is part of a gradient."""
        for unit in self.units.values():
            unit.used.clear()
            unit.in_backward = False
            for flat in unit.flats:
                flat.restore_grads()
        self.in_backward = False

    def _forget_program(self, *, changed: bool) -> None:
        """A first step, or parameters were frozen or thawed: the order, and what is reduced, is to be learned."""
        if self.walk.program is not None and changed:
            if self.queue.holds_grads:
                raise InvalidModel("parameters were frozen or thawed in the middle of an accumulation: do it after it")
            meet("a step before which parameters were frozen or thawed", limit_seconds=self.walk.limit_seconds)
        self.walk.program = None
        self.first = self.make_first_forward()

    # Backward

    def before_backward(self, unit: Unit, call: int) -> None:
        self._begin_backward()
        call = self.places.get((unit.name, call), call)
        if call in unit.begun:
            # Another output of the same call, or the same call of another forward.
            self.walk.serve(unit)
            return
        unit.begun.add(call)
        self.walk.run(unit, Trigger.BEFORE_BACKWARD, call)
        self.walk.serve(unit)
        self.tape.record(Kind.BACKWARD, unit.name)

    def grad_ready(self, unit: Unit, parameter: int) -> None:
        """One more of the unit's gradients is there, that of the parameter with this id."""
        if not self.in_backward:
            self._begin_backward()
        if parameter in unit.with_grads:
            raise InvalidModel(
                f"a parameter of {unit.name} got two gradients in one backward, as a reentrant checkpoint gives them: "
                "say use_reentrant=False in torch.utils.checkpoint"
            )
        if unit.closed:
            raise InvalidModel(
                f"a parameter of {unit.name} got a gradient after the unit's backward was over: it is used outside of "
                "the unit; make the module that uses it the unit (units = 'auto + MODULE')"
            )
        unit.with_grads.add(parameter)
        if unit.complete:
            self.walk.close_complete(unit)

    def _close(self, unit: Unit) -> None:
        """Backward is done with a unit: its parameters go, and its gradients."""
        unit.free()
        self.queue.take(unit, reduces=self.reduces)

    def _begin_backward(self) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            raise InvalidModel("backward(create_graph=True): this engine does not give gradients of gradients")
        if self.first is not None:
            self._learn(self.first)
        self.in_backward = True
        self.walk.closes_passed = self.any_sharded and self.forwards <= 1
        # Buckets that change from step to step hold nothing for the next.
        self.reduces = not self.passes.accumulating or self.plan.accumulate_reduced or self.plan.dynamic
        self.queue.begin()
        for unit in self.units.values():
            unit.begin_backward()
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.walk.end_backward()
        if self.reduces:
            self.queue.flush()
            self.flags.start()
        else:
            self.queue.keep()
        for unit in self.units.values():
            unit.free()
        self.queue.finish()
        if self.reduces:
            self.flags.settle()
        self.land()
        self.in_backward = False
        self.forwards = 0
        for unit in self.units.values():
            for flat in unit.flats:
                flat.restore_grads()
            unit.end_backward()

    # Between backwards

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Somebody clears the gradients of these parameters; with `drop`, also those that are reduced."""
        self.queue.forget(names)
        for unit in self.units.values():
            for flat in unit.flats:
                cleared = {index for index, name in enumerate(flat.names) if name in names}
                if drop:
                    flat.drop_grads(cleared)
                unit.used.difference_update(id(flat.params[index]) for index in cleared)
        if self.in_backward and not self.queue.holds_grads:
            self.queue.drop()
            self._abandon()

    # Update

    def before_step(self) -> None:
        """The update writes into what a gather after the last update may still read."""
        if self.queue.holds_grads:
            raise InvalidModel(
                "the gradients of an accumulation are not reduced yet: run its last backward outside "
                "shardwise.accumulate"
            )
        self.wait_gathers()

    def wait_gathers(self) -> None:
        for unit in self.units.values():
            unit.wait_gather()

    def after_step(self) -> None:
        self.tape.record(Kind.UPDATE, ROOT)
        names = dict.fromkeys([*self.spec.call_order, *self.units])
        for name in names:
            self.units[name].updated()
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.params()])

    # The first step

    def _learn(self, first: FirstForward) -> None:
        """The first forward is over on all ranks: its calls are the program's order."""
        seen = self.gather_seen(first.end())
        sharded = [unit.name for unit in self.units.values() if unit.sharded]
        for unit in self.units.values():
            unit.learned_trainable = unit.trainable
        trainable = {name for unit in self.units.values() for name in unit.trainable_names()}
        units = tuple(
            replace(unit, params=tuple(replace(param, trainable=param.name in trainable) for param in unit.params))
            for unit in self.spec.units
        )
        self.spec = learned(replace(self.spec, units=units), seen=seen, sharded=sharded)
        program = build(self.spec, plan=self.plan)
        self.queue = self.make_queue(program.buckets)
        self.places = first.places_in(self.spec.call_order)
        self.first = None
        self.walk.follow(program, seen=seen)
