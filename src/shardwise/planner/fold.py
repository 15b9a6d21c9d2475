"""Many equal blocks → a few that stand for all, so that a plan of 126 layers is replayed as fast as one of 10.

In a row of equal units, memory grows or shrinks by the same bytes from unit to unit, so peaks are at its ends. One unit
in the middle stands for those that are left out: it is replayed once, and what it leaves behind counts once per unit.
Units are equal if the trace says so (a run) and the plan places and recomputes them equally, with the same layers in
fp8: a unit that differs splits its run. A unit stays if a pattern of the plan would otherwise match nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.program.fp8_layers import is_fp8
from shardwise.spec import ModelSpec, UnitSpec
from shardwise.spec.step import Run

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
