"""The only loop over a program's rows.

Whoever runs a program is an executor: the engine does its operations on tensors, the planner on bytes and on seconds,
the reports on pictures. Executors say what an operation means to them; when it is its turn is decided here.

Two orders hold on every rank, whatever it comes by. Gathers are issued in the program's order: rows that a rank does
not come by are given to its executor as skipped. Reduces are issued in the program's order: a bucket that is complete
early waits for its turn.
"""

from collections.abc import Callable
from typing import Protocol

from shardwise.program.operations import ON_BUCKETS, Kind, Operation, Row, StepProgram, Trigger

Action = Callable[[], object]


class Executor(Protocol):
    """What each operation of a program means."""

    def action(self, operation: Operation, row: Row) -> Action:
        """What doing the operation is."""
        ...

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        """What is to be done of the operation where the run does not come by its row."""
        ...

    def is_ready(self, unit: str) -> bool:
        """Whether the unit's gradients are complete in this backward, and its parameters no longer needed."""
        ...


def run_in_order(program: StepProgram, do: Callable[[Operation, Row], object]) -> None:
    """All rows of a program from its first to its last: what a rank does that comes by every one of them."""
    for row in program.rows:
        for operation in row.operations:
            do(operation, row)


class Compiled:
    """A program in the actions of one executor, row by row."""

    def __init__(self, program: StepProgram, executor: Executor) -> None:
        self.program = program
        self.units = [row.unit for row in program.rows]
        self.has_grads = [row.trigger is Trigger.GRADS_READY for row in program.rows]
        self.index = {(row.trigger, row.unit, row.call): index for index, row in enumerate(program.rows)}
        self.backward_done = program.index(Trigger.BACKWARD_DONE)
        members = {bucket.name: bucket.units for bucket in program.buckets}
        # What is done when a row is reached, and, of the rows of gradients, what waits for the turn of their bucket.
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
        update = program.index(Trigger.AFTER_STEP)
        before, after = _around_update(program.rows[update])
        moved, waited = ([o for o in before if (o.kind is Kind.TO_OWNERS) == moves] for moves in (True, False))
        self.before_step = tuple(executor.action(operation, program.rows[update]) for operation in waited)
        self.to_owners = tuple(executor.action(operation, program.rows[update]) for operation in moved)
        self.after_step = tuple(executor.action(operation, program.rows[update]) for operation in after)
        self.grads_rows = [index for index, has_grads in enumerate(self.has_grads) if has_grads]
        self.reduce_rows = [index for index in self.grads_rows if self.reduces[index]]


def _cut(row: Row) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """(What is this rank's own business when its gradients are ready, what all ranks do in one order)."""
    if row.trigger is not Trigger.GRADS_READY:
        return row.operations, ()
    start = next((i for i, operation in enumerate(row.operations) if operation.kind in ON_BUCKETS), len(row.operations))
    return row.operations[:start], row.operations[start:]


def _around_update(row: Row) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    place = next(i for i, operation in enumerate(row.operations) if operation.kind is Kind.UPDATE)
    return row.operations[:place], row.operations[place:]


class Cursor:
    """Where a run stands in its program."""

    def __init__(self, program: StepProgram, executor: Executor) -> None:
        self.executor = executor
        self._compiled = Compiled(program, executor)
        self._keeping: Compiled | None = None
        self._steps = self._compiled
        # The next row to reach.
        self._next = 0
        # Rows of gradients whose turn has come or does not matter, and the next of those that reduce.
        self._closed: set[str] = set()
        self._next_reduce = 0
        self._in_order = False
        # What is still to be done of a row in which an action has raised, that action first.
        self._undone: tuple[Action, ...] = ()

    def _do(self, actions: tuple[Action, ...]) -> None:
        self._undone, num_done = (), 0
        try:
            for action in actions:
                action()
                num_done += 1
        except BaseException:
            self._undone = actions[num_done:]
            raise

    def take_up(self, *, in_backward: bool) -> None:
        """After an action has raised: it, and what follows on it in its row. In forward, all of its rows."""
        self._do(self._undone)
        if in_backward:
            self._reduce()
        else:
            self._skip_to(self.program.first_of_backward)

    @property
    def program(self) -> StepProgram:
        return self._compiled.program

    def upcoming(self, *, restarts: bool) -> tuple[Operation, ...]:
        """The operations of the next row that has any; with `restarts`, of a new step."""
        rows = self._steps.program.rows
        return next((row.operations for row in rows[0 if restarts else self._next :] if row.operations), ())

    def restart(self, *, at: int = 0) -> None:
        """A new forward, from this row on."""
        self._next = at
        self._undone = ()

    def call_of(self, unit: str, *, after: int) -> int:
        """Which of the program's calls of a unit comes now: the next one after `after` that was not skipped."""
        call = after + 1
        while self._steps.index.get((Trigger.BEFORE_FORWARD, unit, call), self._next) < self._next:
            call += 1
        return call

    def reach(self, trigger: Trigger, unit: str, call: int) -> bool:
        """Do a row; whether there is one. A call that the program does not know, or is past, is not in it."""
        row = self._steps.index.get((trigger, unit, call))
        if row is None or row < self._next:
            return False
        if row > self._next:
            self._skip_to(row)
        self._next = row + 1
        self._do(self._steps.actions[row])
        return True

    def begin_backward(self, *, in_order: bool, keeping: StepProgram | None = None) -> None:
        """`in_order`: a unit whose gradients are ready early waits for its turn, and one that backward has passed has
        all the gradients that it will get. `keeping`: the program of a pass that keeps its gradients.
        """
        if keeping is not None and self._keeping is None:
            self._keeping = Compiled(keeping, self.executor)
        self._steps = self._compiled if keeping is None else self._keeping or self._compiled
        self._in_order = in_order
        self._closed.clear()
        self._next_reduce = 0

    def grads_ready(self, unit: str) -> None:
        """A unit's gradients are complete: take them if it is its turn, and those after it that are complete."""
        row = self._steps.index.get((Trigger.GRADS_READY, unit, 0))
        if row is None:
            # Nobody expected any: they are taken when backward is done.
            return
        if not self._in_order:
            self._close(row)
            return
        steps = self._steps
        while steps.has_grads[self._next] and self.executor.is_ready(steps.units[self._next]):
            self._next += 1
            self._close(self._next - 1)

    def end_backward(self) -> None:
        """Rows that backward did not come by, then the last of its rows."""
        self._skip_to(self._steps.backward_done)
        for row in self._steps.grads_rows:
            if self._steps.units[row] not in self._closed:
                self._close(row)
        self._next = max(self._next, self._steps.backward_done + 1)
        self._do(self._steps.actions[self._steps.backward_done])

    def before_step(self) -> None:
        """What the update has to wait for."""
        for action in self._compiled.before_step:
            action()

    def to_owners(self) -> None:
        """What the update has to find whole."""
        for action in self._compiled.to_owners:
            action()

    def after_step(self) -> None:
        """The update, and what follows on it."""
        for action in self._compiled.after_step:
            action()

    def _close(self, row: int) -> None:
        """Take a unit's gradients, then reduce as far as buckets are complete, in the program's order."""
        steps = self._steps
        self._closed.add(steps.units[row])
        self._do(steps.actions[row])
        self._reduce()

    def _reduce(self) -> None:
        steps = self._steps
        while self._next_reduce < len(steps.reduce_rows):
            reduces = steps.reduce_rows[self._next_reduce]
            if not self._closed.issuperset(steps.bucket[reduces]):
                return
            self._next_reduce += 1
            self._do(steps.reduces[reduces])

    def _skip_to(self, row: int) -> None:
        """Rows that this run does not come by."""
        while self._next < row:
            skipped = self._next
            self._next += 1
            if self._in_order and self._steps.has_grads[skipped]:
                self._close(skipped)
                continue
            self._do(self._steps.skipped[skipped])
