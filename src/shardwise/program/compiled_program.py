"""A step program as actions of one executor, so that running a row is calling a few functions."""

from collections.abc import Callable
from typing import Protocol

from shardwise.program.operations import ON_BUCKETS, Kind, Operation, Row, StepProgram, Trigger

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
