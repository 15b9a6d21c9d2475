"""Many equal blocks → a few that stand for all, so that a plan of 126 layers is replayed as fast as one of 10.

In a row of equal units, memory grows or shrinks by the same bytes from unit to unit, so peaks are at its ends. One unit
in the middle stands for those that are left out: it is replayed once, and what it leaves behind counts once per unit.
Units are equal if the trace says so (a run) and the plan places and recomputes them equally, with the same layers in
fp8: a unit that differs splits its run. A unit stays if a pattern of the plan would otherwise match nothing.

`TracedStep` moves a program's cursor through such a step, in the order of the trace.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple, Protocol

from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.buffers import is_fp8
from shardwise.program.compiled_program import Action, Executor
from shardwise.program.run import Cursor
from shardwise.program.spec import ROOT, ModelSpec, UnitSpec
from shardwise.program.spec.step import Run

_MARGIN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A shortened model: `spec` with the replayed units, how many units each stands for, and those of each run."""

    spec: ModelSpec
    weights: Mapping[str, int]
    chosen: Mapping[Run, tuple[str, ...]]


def shorten(spec: ModelSpec, *, plan: Plan, runs: Sequence[Run]) -> Short:
    """Leave out units with equal neighbours; one unit stands for all of them.

    With offloaded activations none is left out: those of many units must not return at once.
    """
    if not runs or plan.offload_activations:
        return Short(spec=spec, weights={}, chosen={})
    # Longer than the reach of prefetched gathers and of reduces in flight.
    length = 2 * max(plan.prefetch, plan.reduces_in_flight) + _MARGIN
    groups = _equal_units(spec, plan=plan, runs=runs)
    left_out = _left_out(spec, plan=plan, groups=groups, length=length, before=length // 2 + 1)
    weights = {
        names[length // 2]: 1 + sum(name in left_out for name in names)
        for names in groups
        if not left_out.isdisjoint(names)
    }
    chosen = {run: tuple(name for name in run.units if name not in left_out) for run in runs}
    return Short(spec=_without(spec, left_out=left_out), weights=weights, chosen=chosen)


def cut(spec: ModelSpec, *, plan: Plan, runs: Sequence[Run], length: int) -> Short:
    """Remove the middle of each longer row of equal units; no unit stands for the removed ones."""
    groups = _equal_units(spec, plan=plan, runs=runs)
    left_out = _left_out(spec, plan=plan, groups=groups, length=length, before=length - length // 2)
    chosen = {
        run: tuple(name for name in run.units if name not in left_out)
        for run in runs
        if not left_out.isdisjoint(run.units)
    }
    return Short(spec=_without(spec, left_out=left_out), weights={}, chosen=chosen)


def _equal_units(spec: ModelSpec, *, plan: Plan, runs: Sequence[Run]) -> list[list[str]]:
    """Return groups of consecutive units of a run that are placed and recomputed equally, in the same dtypes."""
    placements = plan.placements(unit.name for unit in spec.units)
    in_fp8 = {unit.name: _in_fp8(unit, plan=plan) for unit in spec.units} if plan.has_fp8 else {}

    def kind(name: str) -> tuple[object, ...]:
        return placements[name], plan.recompute_of(name), plan.has_states_on_host(name), in_fp8.get(name)

    return [list(names) for run in runs for _, names in groupby(run.units, key=kind)]


def _in_fp8(unit: UnitSpec, *, plan: Plan) -> tuple[bool, ...]:
    return tuple(is_fp8(param, unit=unit.name, plan=plan) for param in unit.params)


def _left_out(
    spec: ModelSpec, *, plan: Plan, groups: Sequence[Sequence[str]], length: int, before: int
) -> frozenset[str]:
    """Return the units of each group beyond `length`, after the first `before` ones."""
    left_out = {name for names in groups for name in names[before : before + max(len(names) - length, 0)]}
    if left_out:
        names = [unit.name for unit in spec.units]
        kept = [name for name in names if name not in left_out]
        for patterns in (plan.overrides, plan.recompute_overrides, plan.offload_states):
            for pattern in unmatched(() if isinstance(patterns, bool) else patterns, kept):
                left_out.discard(next(name for name in names if fnmatchcase(name, pattern)))
    return frozenset(left_out)


def _without(spec: ModelSpec, *, left_out: Collection[str]) -> ModelSpec:
    if not left_out:
        return spec
    return replace(
        spec,
        units=tuple(unit for unit in spec.units if unit.name not in left_out),
        call_order=tuple(name for name in spec.call_order if name not in left_out),
        traces=(),
    )


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
