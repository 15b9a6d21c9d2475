"""The loop over a program's rows. Only naive.py has another: the engine's results are compared with it.

Executors run a program: the engine's on tensors, the planner's on bytes and on seconds, the reports' on pictures. They
say what an operation means; its turn is decided here.

Two orders hold on every rank, whichever rows it reaches. Gathers are issued in the program's order: rows that a rank
does not reach are given to its executor as skipped. Reduces are issued in the program's order: a bucket that is
complete early waits for its turn.

A step program as actions of one executor, so that running a row is calling a few functions.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from shardwise.program.operations import ON_BUCKETS, Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.rules.context import Rules, StepContext, StepEvent

Action = Callable[[], object]


class Executor(Protocol):
    """Gives each operation of a program its meaning."""

    def action(self, operation: Operation, row: Row) -> Action:
        """Return a function that does the operation."""

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        """Return a function that does what is left of an operation whose row the run does not reach, if anything is."""

    def is_ready(self, unit: str) -> bool:
        """Return whether the unit's gradients are complete in this backward, and its parameters no longer needed."""


class CompiledProgram:
    """The actions of one executor for each row of a program."""

    def __init__(self, program: StepProgram, executor: Executor) -> None:
        self.program = program
        self.units = [row.unit for row in program.rows]
        self.has_grads = [row.trigger is Trigger.GRADS_READY for row in program.rows]
        self.index = {(row.trigger, row.unit, row.call): index for index, row in enumerate(program.rows)}
        self.backward_done = program.index(Trigger.BACKWARD_DONE)
        members = {bucket.name: bucket.units for bucket in program.buckets}
        # Actions when a row is reached; and `reduces`, those of a row of gradients that wait for their bucket's turn.
        self.actions: list[tuple[Action, ...]] = []
        self.reduces: list[tuple[Action, ...]] = []
        self.skipped: list[tuple[Action, ...]] = []
        # The units whose gradients are reduced in a row.
        self.bucket: list[tuple[str, ...]] = []
        for row in program.rows:
            now, later = _cut(row)
            self.actions.append(tuple(executor.action(operation, row) for operation in now))
            self.reduces.append(tuple(executor.action(operation, row) for operation in later))
            skipped = (executor.skipped(operation, row) for operation in now)
            self.skipped.append(tuple(action for action in skipped if action is not None))
            reduced = [operation.subject for operation in later if operation.kind is Kind.REDUCE]
            self.bucket.append(tuple(unit for name in reduced for unit in members[name]))
        row = program.rows[program.index(Trigger.AFTER_STEP)]
        update = [operation.kind for operation in row.operations].index(Kind.UPDATE)
        before, after = row.operations[:update], row.operations[update:]
        moved, waited = ([o for o in before if (o.kind is Kind.TO_OWNERS) == moves] for moves in (True, False))
        self.before_step, self.to_owners, self.after_step = (
            tuple(executor.action(operation, row) for operation in operations) for operations in (waited, moved, after)
        )
        self.grads_rows = [index for index, has_grads in enumerate(self.has_grads) if has_grads]
        self.reduce_rows = [index for index in self.grads_rows if self.reduces[index]]


def _cut(row: Row) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return (operations of one rank when its gradients are ready, operations that all ranks issue in one order)."""
    if row.trigger is not Trigger.GRADS_READY:
        return row.operations, ()
    start = next((i for i, operation in enumerate(row.operations) if operation.kind in ON_BUCKETS), len(row.operations))
    return row.operations[:start], row.operations[start:]


class Named(Protocol):
    """A unit at work."""

    @property
    def name(self) -> str: ...


def run_in_order(program: StepProgram, do: Callable[[Operation, Row], object]) -> None:
    """Run every row in order."""
    for row in program.rows:
        for operation in row.operations:
            do(operation, row)


def _unplanned(kind: Kind, unit: str) -> Row:
    """Return the row for a unit that computes at a place that the program does not have."""
    return Row(trigger=Trigger.DEMANDED, unit=unit, call=0, operations=(Operation(kind=kind, subject=unit),))


class _Learning:
    """Runs rules event by event, because the order of the events is not known in advance."""

    def __init__(self, rules: Rules, context: StepContext) -> None:
        self._rules, self._context = rules, context
        self._state: Any = rules.first_state(context)

    def row(self, trigger: Trigger, unit: str, call: int) -> Row:
        """Return the row of an event that happens now."""
        event = StepEvent(trigger=trigger, unit=unit, call=call)
        self._state, operations = self._rules.by_trigger[trigger](self._state, event, self._context)
        return Row(trigger=trigger, unit=unit, call=call, operations=operations)


class Cursor:
    """The position of a run in its program."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._keeping: CompiledProgram | None = None
        # The next row to reach.
        self._next = 0
        # Units whose gradients were taken in this backward, and the next of the rows that reduce.
        self._closed: set[str] = set()
        self._next_reduce = 0
        self._in_order: bool | None = None
        # While the order is learned; and, in the backward after it, (unit, call) on this rank → the program's call.
        self._learning: _Learning | None = None
        self._places: Mapping[tuple[str, int], int] = {}

    def follow(self, program: StepProgram) -> None:
        """Follow this program from the next step on."""
        self._compiled = self._steps = CompiledProgram(program, self.executor)
        self._keeping = None
        self._next = 0

    @property
    def program(self) -> StepProgram:
        return self._compiled.program

    def upcoming(self, *, restarts: bool) -> tuple[Operation, ...]:
        """Return the operations of the next row that has any; with `restarts`, of a new step."""
        rows = self._steps.program.rows
        return next((row.operations for row in rows[0 if restarts else self._next :] if row.operations), ())

    @property
    def keeps(self) -> bool:
        """Return whether this pass keeps its gradients."""
        return self._steps is not self._compiled

    def run(self, row: Row) -> None:
        """Run a row that is not in the program."""
        self._do(tuple(self.executor.action(operation, row) for operation in row.operations))

    def _do(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            action()

    # The first step

    def learn(self, rules: Rules, context: StepContext) -> None:
        """Begin a forward whose order is not known: its rows come from these rules, event by event."""
        self._learning = _Learning(rules, context)

    @property
    def learns(self) -> bool:
        return self._learning is not None

    def learned(self, *, places: Mapping[tuple[str, int], int]) -> None:
        """End that forward; its backward follows the program that was learned.

        places   (unit, call) of this rank's forward → the program's call of the unit
        """
        self._learning = None
        self._places = places
        self._next = self.program.first_of_backward

    # Forward

    def restart(self) -> None:
        """Begin a new forward."""
        self._next = 0
        self._places = {}
        self._learning = None

    def call_of(self, unit: str, *, after: int) -> int:
        """Return the program's call of a unit that comes now: the next one after `after` that was not skipped."""
        call = after + 1
        while self._steps.index.get((Trigger.BEFORE_FORWARD, unit, call), self._next) < self._next:
            call += 1
        return call

    def reach(self, trigger: Trigger, unit: str, call: int) -> bool:
        """Run a row; return whether the program has it, and has not passed it."""
        if self._learning is not None:
            self.run(self._learning.row(trigger, unit, call))
            return True
        row = self._steps.index.get((trigger, unit, call))
        if row is None or row < self._next:
            return False
        if row > self._next:
            self._skip_to(row)
        self._next = row + 1
        self._do(self._steps.actions[row])
        return True

    def before_forward(self, unit: Named, call: int) -> None:
        """Run the row of a call that begins."""
        if not self.reach(Trigger.BEFORE_FORWARD, unit.name, call):
            self.run(_unplanned(Kind.FORWARD, unit.name))

    # Backward

    def begin_backward(self, *, in_order: bool | None, keeping: Callable[[], StepProgram] | None = None) -> None:
        """Begin a backward.

        in_order   a unit whose gradients are ready early waits for its turn, and one that backward has passed has all
                   the gradients that it will get; without, all is gathered before the first gradients are taken, since
                   one rank may wait for a gather where another waits for a reduce. None: nothing is gathered
        keeping    makes the program of a pass that keeps its gradients, if this is one
        """
        if keeping is not None and self._keeping is None:
            self._keeping = CompiledProgram(keeping(), self.executor)
        self._steps = self._compiled if keeping is None else self._keeping or self._compiled
        self._in_order = in_order
        self._closed.clear()
        self._next_reduce = 0

    def rewind(self) -> None:
        """Go back through the forwards once more."""
        self._next = self._steps.program.first_of_backward

    def before_backward(self, unit: Named, call: int) -> None:
        """Run the row of a call whose backward begins."""
        name = unit.name
        if not self.reach(Trigger.BEFORE_BACKWARD, name, self._places.get((name, call), call)):
            self.run(_unplanned(Kind.BACKWARD, name))

    def before_recompute(self, unit: Named, *, calls_of: Callable[[str], Collection[int]]) -> None:
        """Skip what backward will not come to before a unit that is computed again, and has not been gathered for it.

        So that all ranks have gathered the same. Backward of what is computed again with the unit is still to come.
        """
        steps = self._steps
        if self._in_order is False:
            self._skip_to(steps.backward_done)
        while self._in_order and self._next < steps.backward_done:
            row = steps.program.rows[self._next]
            calls = {self._places.get((row.unit, call), call) for call in calls_of(row.unit)}
            begins = row.trigger is Trigger.BEFORE_BACKWARD
            unannounced = (Trigger.BEFORE_BACKWARD, row.unit, 0) not in steps.index
            is_to_come = row.call in calls if begins else unannounced and bool(calls)
            if not is_to_come or (begins and row.unit == unit.name):
                self._skip_to(self._next + 1)
            if is_to_come:
                break

    def grads_ready(self, unit: Named) -> None:
        """Take a unit's complete gradients if it is its turn, and those after it that are complete."""
        steps = self._steps
        row = steps.index.get((Trigger.GRADS_READY, unit.name, 0))
        if row is None:
            # No gradients were expected: they are taken when backward is done.
            return
        if not self._in_order:
            if self.executor.is_ready(unit.name):
                self._close(row)
            return
        while steps.has_grads[self._next] and self.executor.is_ready(steps.units[self._next]):
            self._next += 1
            self._close(self._next - 1)

    def end_backward(self) -> None:
        """Run the rows that backward did not reach, then the last of its rows."""
        self._skip_to(self._steps.backward_done)
        for row in self._steps.grads_rows:
            if self._steps.units[row] not in self._closed:
                self._close(row)
        self._next = max(self._next, self._steps.backward_done + 1)
        self._do(self._steps.actions[self._steps.backward_done])

    def _close(self, row: int) -> None:
        """Take a unit's gradients, then reduce as far as buckets are complete, in the program's order."""
        steps = self._steps
        if self._in_order is False:
            self._skip_to(steps.backward_done)
        self._closed.add(steps.units[row])
        self._do((*steps.actions[row], *self._due()))

    def _due(self) -> tuple[Action, ...]:
        """Return the reduces whose turn has come: of complete buckets, up to the first that is not."""
        steps = self._steps
        due: tuple[Action, ...] = ()
        while self._next_reduce < len(steps.reduce_rows):
            reduces = steps.reduce_rows[self._next_reduce]
            if not self._closed.issuperset(steps.bucket[reduces]):
                break
            self._next_reduce += 1
            due += steps.reduces[reduces]
        return due

    def _skip_to(self, row: int) -> None:
        """Skip rows that this run does not reach."""
        while self._next < row:
            skipped = self._next
            self._next += 1
            if self._in_order and self._steps.has_grads[skipped]:
                self._close(skipped)
                continue
            self._do(self._steps.skipped[skipped])

    # Update

    def before_step(self) -> None:
        """Wait for what the update writes into."""
        for action in self._compiled.before_step:
            action()

    def to_owners(self) -> None:
        """Send matrices that one rank steps whole to that rank."""
        for action in self._compiled.to_owners:
            action()

    def after_step(self) -> None:
        """Run the update, and the operations after it."""
        for action in self._compiled.after_step:
            action()
