"""Many equal blocks → a few that stand for all, so that a plan of 126 layers is replayed as fast as one of 10.

Between the ends of a row of equal units, what is held grows or shrinks by the same bytes from unit to unit, so peaks
lie at its ends. One unit in the middle stands for those that are left out: it happens once, and what it leaves behind
counts as often as it stands for a unit. Units are equal if the trace says so (a run), and if the plan places and
recomputes them alike: a unit that differs splits its run. No unit is left out if a pattern of the plan would then
match none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.spec import ModelSpec
from shardwise.spec.step import Run

_MARGIN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """The units that are replayed: `spec` without the others, how often each counts, and those of each run."""

    spec: ModelSpec
    weights: Mapping[str, int]
    chosen: Mapping[Run, tuple[str, ...]]


def shorten(spec: ModelSpec, *, plan: Plan, runs: Sequence[Run]) -> Short:
    """Leave out units whose neighbours are equal; one of them stands for all.

    None is left out where activations are offloaded: what comes back for a unit must not come back for many at once.
    """
    if not runs or plan.offload_activations:
        return Short(spec=spec, weights={}, chosen={})
    # Beyond the reach of what is gathered ahead and of what is being reduced.
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
    """A model with fewer units: the middle of each longer row of equal units goes, and nothing stands for it."""
    groups = _equal_units(spec, plan=plan, runs=runs)
    left_out = _left_out(spec, plan=plan, groups=groups, length=length, before=length - length // 2)
    chosen = {
        run: tuple(name for name in run.units if name not in left_out)
        for run in runs
        if not left_out.isdisjoint(run.units)
    }
    return Short(spec=_without(spec, left_out=left_out), weights={}, chosen=chosen)


def _equal_units(spec: ModelSpec, *, plan: Plan, runs: Sequence[Run]) -> list[list[str]]:
    """Units of a run that follow on each other, and are placed and recomputed alike."""
    placements = plan.placements(unit.name for unit in spec.units)
    return [
        list(names)
        for run in runs
        for _, names in groupby(run.units, key=lambda name: (placements[name], plan.recompute_of(name)))
    ]


def _left_out(
    spec: ModelSpec, *, plan: Plan, groups: Sequence[Sequence[str]], length: int, before: int
) -> frozenset[str]:
    """What of each group is too many for `length`, of which so many come `before` those that are left out."""
    left_out = {name for names in groups for name in names[before : before + max(len(names) - length, 0)]}
    if left_out:
        names = [unit.name for unit in spec.units]
        kept = [name for name in names if name not in left_out]
        for patterns in (plan.overrides, plan.recompute_overrides):
            for pattern in unmatched(patterns, kept):
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
