"""Moves a program's cursor through a planned step, in the order of the trace."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.compiled_program import Action, Executor
from shardwise.program.run import Cursor
from shardwise.spec import ROOT

Key = tuple[str, str, int]
"""(trigger, unit, call): a row of a trace, or of a program."""

_TRIGGERS = {trigger.value: trigger for trigger in Trigger}
_FORWARD = (Trigger.BEFORE_FORWARD, Trigger.AFTER_FORWARD)
_ENDS: tuple[Key, ...] = ((Trigger.BACKWARD_DONE.value, ROOT, 0), (Trigger.AFTER_STEP.value, ROOT, 0))


def do_nothing() -> None:
    """Stand in for an operation that an executor ignores."""


class _Unit(NamedTuple):
    """A unit by its name, which is all that the cursor needs."""

    name: str


class PlannedExecutor(Executor, Protocol):
    """An executor with the set of units whose gradients are complete."""

    ready: set[str]


def skipped_action(executor: Executor, operation: Operation, row: Row, *, called: Collection[str]) -> Action | None:
    """Return what a rank does of a row that it does not reach, if all ranks keep the program's order.

    It takes part in the gathers of units that it does not call, and frees those that it has not `called`.
    """
    if operation.kind is Kind.GATHER:
        return executor.action(operation, row)
    if operation.kind is Kind.FREE:
        free = executor.action(operation, row)
        return lambda: None if operation.subject in called else free()
    return None


def keys_in_order(traced: Iterable[Key], *, program: StepProgram) -> list[Key]:
    """Return the rows of a step up to the update: those of the trace or, if there is none, of the program."""
    keys = list(traced) or [(row.trigger.value, row.unit, row.call) for row in program.rows]
    return keys + [key for key in _ENDS if key not in keys]


class TracedStep:
    """A step of a program, row by row. `in_order` as for Cursor.begin_backward, of one forward."""

    def __init__(self, program: StepProgram, executor: PlannedExecutor, *, in_order: bool) -> None:
        self._executor = executor
        self._cursor = Cursor(executor)
        self._cursor.follow(program)
        self._in_order = in_order
        self._in_backward = False

    def reach(self, key: Key) -> None:
        trigger, unit, call = _TRIGGERS[key[0]], key[1], key[2]
        if not self._in_backward and trigger not in _FORWARD:
            self._in_backward = True
            self._cursor.begin_backward(in_order=self._in_order or None)
        if trigger is Trigger.GRADS_READY:
            self._executor.ready.add(unit)
            self._cursor.grads_ready(_Unit(unit))
        elif trigger is Trigger.BACKWARD_DONE:
            self._cursor.end_backward()
        elif trigger is Trigger.AFTER_STEP:
            self._cursor.before_step()
            self._cursor.to_owners()
            self._cursor.after_step()
        else:
            self._cursor.reach(trigger, unit, call)
