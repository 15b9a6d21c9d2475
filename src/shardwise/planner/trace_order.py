"""A program in the order of a trace: how the planner moves the cursor through a step that nobody runs."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from shardwise.program import StepProgram, Trigger
from shardwise.program.compiled_program import Executor
from shardwise.program.run import Cursor
from shardwise.spec import ROOT

Key = tuple[str, str, int]
"""(trigger, unit, call): a row of a trace, or of a program."""

_TRIGGERS = {trigger.value: trigger for trigger in Trigger}
_FORWARD = (Trigger.BEFORE_FORWARD, Trigger.AFTER_FORWARD)
_ENDS: tuple[Key, ...] = ((Trigger.BACKWARD_DONE.value, ROOT, 0), (Trigger.AFTER_STEP.value, ROOT, 0))


def do_nothing() -> None:
    """What an operation is to an executor that has nothing to do for it."""


class _Unit(NamedTuple):
    """A unit, of which the planner has nothing but the name."""

    name: str


class PlannedExecutor(Executor, Protocol):
    """An executor that is told which units' gradients are complete."""

    ready: set[str]


def keys_in_order(traced: Iterable[Key], *, program: StepProgram) -> list[Key]:
    """The rows of a step: those of the trace, or of the program where there is none, up to the update."""
    keys = list(traced) or [(row.trigger.value, row.unit, row.call) for row in program.rows]
    return keys + [key for key in _ENDS if key not in keys]


class TracedStep:
    """A step of a program, row by row. `in_order` is as of Cursor.begin_backward."""

    def __init__(self, program: StepProgram, executor: PlannedExecutor, *, in_order: bool) -> None:
        self._executor = executor
        self._cursor = Cursor(executor)
        self._cursor.follow(program)
        self._in_order = in_order
        self._in_backward = False

    def reach(self, key: Key) -> None:
        """Do what the engine does when this happens."""
        trigger, unit, call = _TRIGGERS[key[0]], key[1], key[2]
        if not self._in_backward and trigger not in _FORWARD:
            self._in_backward = True
            self._cursor.begin_backward(in_order=self._in_order)
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
