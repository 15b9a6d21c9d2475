"""Many equal blocks → a few that stand for all, so that a plan of 126 layers is replayed as fast as one of 10.

Between the ends of a run of equal units, what is held grows or shrinks by the same bytes from unit to unit, so peaks
lie at its ends. One unit in the middle stands for those that are left out: it happens once, and what it leaves behind
counts as often as it stands for a unit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardwise.plan import Plan
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
    """Leave out units of a run whose neighbours are placed and recomputed as they are.

    None is left out where activations are offloaded: what comes back for a unit must not come back for many at once.
    """
    if not runs or plan.offload_activations:
        return Short(spec=spec, weights={}, chosen={})
    placements = plan.placements(unit.name for unit in spec.units)
    # Beyond the reach of what is gathered ahead and of what is being reduced.
    length = 2 * max(plan.prefetch, plan.reduces_in_flight) + _MARGIN
    weights: dict[str, int] = {}
    left_out: set[str] = set()
    chosen: dict[Run, tuple[str, ...]] = {}
    for run in runs:
        for _, group in groupby(run.units, key=lambda name: (placements[name], plan.recompute_of(name))):
            names = list(group)
            num_left_out = len(names) - length
            if num_left_out > 0:
                middle = length // 2
                weights[names[middle]] = num_left_out + 1
                left_out.update(names[middle + 1 : middle + 1 + num_left_out])
        chosen[run] = tuple(name for name in run.units if name not in left_out)
    if not left_out:
        return Short(spec=spec, weights={}, chosen=chosen)
    return Short(spec=_without(spec, left_out=left_out), weights=weights, chosen=chosen)


def cut(spec: ModelSpec, *, runs: Sequence[Run], length: int) -> Short:
    """A model with fewer units: the middle of each longer run goes, and nothing stands for it."""
    chosen = {
        run: (*run.units[: length - length // 2], *run.units[-(length // 2) :])
        for run in runs
        if len(run.units) > length
    }
    left_out = {name for run, names in chosen.items() for name in run.units if name not in names}
    if not left_out:
        return Short(spec=spec, weights={}, chosen={})
    return Short(spec=_without(spec, left_out=left_out), weights={}, chosen=chosen)


def _without(spec: ModelSpec, *, left_out: Collection[str]) -> ModelSpec:
    return replace(
        spec,
        units=tuple(unit for unit in spec.units if unit.name not in left_out),
        call_order=tuple(name for name in spec.call_order if name not in left_out),
        traces=(),
    )
