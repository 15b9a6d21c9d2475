"""The runner: what happens in a step → the operations of the program, issued in the program's order.

Two things are kept in order on every rank, each in a process group of its own: gathers, and reduces. A rank that
skips a unit issues the unit's gathers all the same, before the next one; a bucket that is ready early waits for
those before it; what is left when backward ends is flushed in order.

The first step finds out in which order the units are called; it gathers on demand and nothing ahead.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.autograd import Variable

from shardwise.engine.reduce import ReduceBucket
from shardwise.engine.tape import Tape
from shardwise.engine.unit import Unit
from shardwise.errors import InvalidModel
from shardwise.plan import Plan
from shardwise.program import Bucket, Kind, Operation, Row, StepProgram, Trigger, build
from shardwise.spec import ROOT, ModelSpec


class Runner:
    """One model's steps."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        plan: Plan,
        units: dict[str, Unit],
        make_bucket: Callable[[Bucket], ReduceBucket],
        broadcast_buffers: Callable[[], None],
        agree: Callable[[list[str]], list[str]],
        tape: Tape,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.units = units
        self.root = units[ROOT]
        self.tape = tape
        self.make_bucket = make_bucket
        self.broadcast_buffers = broadcast_buffers
        self.agree = agree
        self.buckets: list[ReduceBucket] = []
        self.bucket_of: dict[str, ReduceBucket] = {}
        self.program: StepProgram | None = None
        self.rows: tuple[Row, ...] = ()
        self.row_of: dict[tuple[Trigger, str, int], int] = {}
        self._last_row_of_backward = 0
        # The next row to run; the calls of a first step.
        self.cursor = 0
        self.observed: list[str] = []
        self.in_backward = False
        self.next_bucket = 0
        self.reducing: list[ReduceBucket] = []

    # Forward

    def recomputing(self) -> bool:
        """Whether this thread runs a backward: then a forward is a recomputation."""
        return torch._C._current_graph_task_id() != -1

    def before_forward(self, unit: Unit) -> None:
        if self.recomputing() and torch.is_grad_enabled() and not unit.calls:
            # Its forward ran without gradients, so nothing of the program knows of it.
            raise InvalidModel(
                f"{unit.name} is recomputed by a reentrant checkpoint: say use_reentrant=False in "
                "torch.utils.checkpoint"
            )
        if not torch.is_grad_enabled() or self.recomputing():
            unit.ensure()
            return
        if unit is self.root:
            self._begin()
        if self.program is None:
            self.observed.append(unit.name)
        else:
            self._run(unit, Trigger.BEFORE_FORWARD, unit.calls)
        unit.ensure()
        self.tape.record(Kind.FORWARD, unit.name)
        unit.calls += 1

    def after_forward(self, unit: Unit, *, differentiable: bool) -> None:
        if self.recomputing():
            return
        if not torch.is_grad_enabled():
            unit.end_backward()
            return
        if not differentiable:
            # Nothing will announce its backward, so what autograd saved of it must stay.
            return
        if self.program is not None:
            self._run(unit, Trigger.AFTER_FORWARD, unit.calls - 1)
        elif unit is not self.root and unit.placement.reshard_after_forward:
            unit.free()

    def _begin(self) -> None:
        """A new step; whatever the last one left undone (a backward that raised, or none) is dropped."""
        for bucket in self.buckets:
            bucket.drop()
        if self.in_backward:
            for unit in self.units.values():
                for flat in unit.flats:
                    flat.restore_grads()
        self.in_backward = False
        self.reducing.clear()
        self.cursor = 0
        self.observed.clear()
        for unit in self.units.values():
            unit.begin(self.grad_ready)
        if self.program is None:
            self.broadcast_buffers()

    # Backward

    def before_backward(self, unit: Unit, call: int) -> None:
        self._begin_backward()
        if call in unit.begun:
            # Another output of the same call, or the same call of another forward.
            unit.ensure()
            return
        unit.begun.add(call)
        self._run(unit, Trigger.BEFORE_BACKWARD, call)
        unit.ensure()
        self.tape.record(Kind.BACKWARD, unit.name)

    def grad_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """One more of the unit's gradients is there."""
        if not self.in_backward:
            self._begin_backward()
        if id(parameter) in unit.with_grads:
            raise InvalidModel(
                f"a parameter of {unit.name} got two gradients in one backward, as a reentrant checkpoint gives them: "
                "say use_reentrant=False in torch.utils.checkpoint"
            )
        unit.with_grads.add(id(parameter))
        if len(unit.with_grads) == unit.num_expected:
            self._grads_ready(unit)

    def _grads_ready(self, unit: Unit) -> None:
        row = self.row_of.get((Trigger.GRADS_READY, unit.name, 0))
        if row is not None and row >= self.cursor:
            self._skip_to(row)
            self.cursor = row + 1
        unit.free()
        self.bucket_of[unit.name].take_grads(unit)
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].complete:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self.next_bucket]
        bounded = [other for other in self.reducing if other.sharded]
        if bucket.sharded and len(bounded) >= self.plan.reduces_in_flight:
            bounded[0].finish()
            self.reducing.remove(bounded[0])
        bucket.start()
        self.reducing.append(bucket)
        self.next_bucket += 1

    def _begin_backward(self) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            raise InvalidModel("backward(create_graph=True): this engine does not give gradients of gradients")
        self.in_backward = True
        self.next_bucket = 0
        if self.program is None:
            self._learn()
        for unit in self.units.values():
            unit.begin_backward()
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._skip_to(self._last_row_of_backward)
        while self.next_bucket < len(self.buckets):
            self._reduce_next()
        for unit in self.units.values():
            unit.free()
        for bucket in self.reducing:
            bucket.finish()
        self.reducing.clear()
        self.in_backward = False
        for unit in self.units.values():
            unit.end_backward()

    # Update

    def before_step(self) -> None:
        """The update writes into what a gather after the last update may still read."""
        for unit in self.units.values():
            unit.wait_gather()

    def after_step(self) -> None:
        self.tape.record(Kind.UPDATE, ROOT)
        names = dict.fromkeys([*self.spec.call_order, *self.units])
        for name in names:
            self.units[name].updated()
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.params()])

    # The program

    def _learn(self) -> None:
        """The first forward is over: its calls are the program's order."""
        self.spec = replace(self.spec, call_order=tuple(self.agree(self.observed)))
        self._set_program(build(self.spec, plan=self.plan))
        # This backward still goes by demand; the cursor stands where nothing is left to run.
        self.cursor = len(self.rows)

    def _set_program(self, program: StepProgram) -> None:
        self.program = program
        self.buckets = [self.make_bucket(bucket) for bucket in program.buckets]
        self.bucket_of = {unit.name: bucket for bucket in self.buckets for unit in bucket.units}
        self.rows = program.rows
        self._last_row_of_backward = next(
            i for i, row in enumerate(program.rows) if row.trigger is Trigger.BACKWARD_DONE
        )
        self.row_of = program.table()

    def _run(self, unit: Unit, trigger: Trigger, call: int) -> None:
        """Do a row's operations. A call that the program does not know, or is past, is served on demand."""
        row = self.row_of.get((trigger, unit.name, call))
        if row is None or row < self.cursor:
            return
        self._skip_to(row)
        for operation in self.rows[row].operations:
            self._do(operation)
        self.cursor = row + 1

    def _skip_to(self, row: int) -> None:
        """Rows that this rank does not come by: it takes part in their gathers, and frees what it does not need."""
        while self.cursor < row:
            skipped = self.rows[self.cursor]
            self.cursor += 1
            unit = self.units[skipped.unit]
            for operation in skipped.operations:
                if operation.kind is Kind.GATHER:
                    self.units[operation.subject].gather()
                elif operation.kind is Kind.FREE and not unit.calls:
                    unit.free()

    def _do(self, operation: Operation) -> None:
        unit = self.units.get(operation.subject)
        if operation.kind is Kind.GATHER:
            assert unit is not None
            unit.gather()
        elif operation.kind is Kind.WAIT_GATHER:
            assert unit is not None
            unit.wait_gather()
        elif operation.kind is Kind.FREE:
            assert unit is not None
            unit.free()
        elif operation.kind is Kind.BROADCAST:
            self.broadcast_buffers()
