"""Where a rank stands in its program, and the operations that it issues on the way.

A rank that does not come by a row takes part in its collectives all the same, before it goes on: every rank issues
gathers and reduces in the program's order.
"""

from collections.abc import Callable, Mapping

from shardwise.comm.agreement import meet
from shardwise.engine.params.unit import Unit
from shardwise.engine.step.learn import Observation, first_row_of_backward, whole_after_forward
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger


class Walk:
    """`close(unit)` is called when backward has left a unit; `broadcast_buffers()` where the program says."""

    def __init__(
        self, units: Mapping[str, Unit], *, close: Callable[[Unit], None], broadcast_buffers: Callable[[], None]
    ) -> None:
        self.units = units
        self.close = close
        self.broadcast_buffers = broadcast_buffers
        self.program: StepProgram | None = None
        # Autograd goes back through a forward in reverse, so a unit whose row is passed has all the gradients that it
        # will get; unless two forwards are under way. Where nothing is sharded nobody waits for it.
        self.closes_passed = False
        # How long this rank waits for the others where it leaves the program.
        self.limit_seconds = 60.0
        self._rows: tuple[Row, ...] = ()
        self._row_of: dict[tuple[Trigger, str, int], int] = {}
        self._last_row_of_backward = 0
        # The next row to run.
        self._cursor = 0

    def follow(self, program: StepProgram, *, seen: list[Observation]) -> None:
        """Take up a program after forward, and bring all ranks to where it stands there, whatever each has called."""
        self.program = program
        self._rows = program.rows
        self._row_of = program.table()
        self._last_row_of_backward = next(
            i for i, row in enumerate(program.rows) if row.trigger is Trigger.BACKWARD_DONE
        )
        whole = whole_after_forward(program)
        for unit in self.units.values():
            if unit.sharded and unit.name not in whole:
                unit.free()
            elif unit.sharded and not all(unit.name in other.whole for other in seen):
                unit.gather()
        self._cursor = first_row_of_backward(program)

    def restart(self) -> None:
        """A new forward."""
        self._cursor = 0

    def place_of_call(self, unit: Unit) -> int:
        """Which of the program's calls of a unit comes now: the next one, of those that were not skipped."""
        call = unit.call + 1
        while self._row_of.get((Trigger.BEFORE_FORWARD, unit.name, call), self._cursor) < self._cursor:
            call += 1
        return call

    def run(self, unit: Unit, trigger: Trigger, call: int) -> None:
        """Do a row's operations. A call that the program does not know, or is past, is served on demand."""
        row = self._row_of.get((trigger, unit.name, call))
        if row is None or row < self._cursor:
            return
        self._skip_to(row)
        for operation in self._rows[row].operations:
            self._do(operation)
        self._cursor = row + 1

    def close_complete(self, unit: Unit) -> None:
        """A unit has its last gradient: close it if it is its turn, and those after it that are complete.

        One that is complete early (an outer one, of which the last gradient comes from inside) waits for its turn. Of
        one that is partly frozen, other parameters may be needed yet: it is closed when backward has left it.
        """
        if not self.closes_passed or (Trigger.GRADS_READY, unit.name, 0) not in self._row_of:
            self.close(unit)
            return
        while self._rows[self._cursor].trigger is Trigger.GRADS_READY:
            unit = self.units[self._rows[self._cursor].unit]
            if not unit.complete or (unit.sharded and unit.partly_frozen):
                return
            self._cursor += 1
            self.close(unit)

    def end_backward(self) -> None:
        self._skip_to(self._last_row_of_backward)

    def serve(self, unit: Unit) -> None:
        """Where the program did not see to it, a unit is gathered now: by all ranks, or not at all."""
        if not unit.whole:
            what = f"a gather of {unit.name} that the first step had no place for (dynamic = true agrees on each)"
            meet(what, limit_seconds=self.limit_seconds)
        unit.ensure()

    def _skip_to(self, row: int) -> None:
        """Rows that this rank does not come by: it takes part in their collectives, and frees what it does not need."""
        while self._cursor < row:
            skipped = self._rows[self._cursor]
            self._cursor += 1
            unit = self.units[skipped.unit]
            if skipped.trigger is Trigger.GRADS_READY and self.closes_passed:
                self.close(unit)
                continue
            for operation in skipped.operations:
                if operation.kind is Kind.GATHER:
                    self.units[operation.subject].gather()
                elif operation.kind is Kind.FREE and not unit.calls:
                    unit.free()

    def _do(self, operation: Operation) -> None:
        if operation.kind is Kind.GATHER:
            self.units[operation.subject].gather()
        elif operation.kind is Kind.WAIT_GATHER:
            self.units[operation.subject].wait_gather()
        elif operation.kind is Kind.FREE:
            self.units[operation.subject].free()
        elif operation.kind is Kind.BROADCAST:
            self.broadcast_buffers()
