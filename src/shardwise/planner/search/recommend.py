"""The recommended candidate, the reason, and the condition for another, as values for measure/report/text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter

from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.search.candidates import Candidate, SpecFor, cost, largest_batch

PAIR_BAND = 0.05
"""The error band of the ratio of two predictions on one cluster: most of their errors are common to both.

Two plans are equally fast if one is slower by no more than this, in whole percent, as it is printed.
"""

ROOM = 0.08
"""The share of a device's memory that a plan must leave, to be preferred to one that does so, for being simpler."""

# Verdicts on candidates that can be recommended, the best first.
_VERDICTS = ("yes", "tight", "unknown")
_ORDER = list(STRATEGIES)
_SPEED = attrgetter("samples_per_s")


class Reason(Enum):
    """Why a candidate is recommended, or why none is."""

    SMALLEST_PEAK = "the smallest peak"
    SIMPLEST = "the simplest that fits, where time is not predicted"
    NOTHING_TO_SHARD = "the simplest, since one rank has nothing to shard"
    NEARLY_FASTEST = "the simplest within PAIR_BAND of the fastest, or of those that leave ROOM"
    FASTEST = "the fastest"
    ONLY_ONE = "the only one that fits"
    ASKED = "the only strategy that was asked for"
    CAPACITY_UNKNOWN = "none: the device's capacity is not known"
    NOTHING_FITS = "none: nothing fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A candidate that is not recommended.

    `speed`: its samples per second, relative to the fastest that fits; with goal `memory`, to the recommended one.
    """

    candidate: Candidate
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpler(Rival):
    """The simplest strategy that is not recommended, because it does not fit or is slower."""

    is_too_large: bool


class Condition(Enum):
    """The condition for recommending the runner-up."""

    PLAN = "with RunnerUp.plan it fits"
    CAPACITY = "on a device of RunnerUp.capacity_bytes it fits"
    PREFERENCE = "it is faster, and would win if that counted more than memory"
    LINKS = "with faster links it would be the fastest"
    ROOM = "with room for the recommended micro-batch it might be"
    NONE = "it is slower over any links"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp(Rival):
    """The simplest candidate that does not fit, or the fastest other one."""

    condition: Condition
    plan: Plan | None = None
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """`index` of the recommended candidate; None if there is none.

    slower      how much slower than the fastest it is, as a share of its speed, if `reason` is NEARLY_FASTEST
    fastest     that candidate
    simpler     the simplest strategy, if it is not recommended
    runner_up   another candidate, and its condition
    """

    index: int | None
    reason: Reason
    best: Candidate | None = None
    slower: float = 0.0
    fastest: Candidate | None = None
    simpler: Simpler | None = None
    runner_up: RunnerUp | None = None


def recommend(
    found: Sequence[Candidate], *, goal: str, spec_for: SpecFor, optimizer: str, quick: bool = False
) -> Recommendation:
    """Recommend the fastest that fits, or the simplest of those as fast; with goal `memory` the smallest.

    If time cannot be predicted, recommend the simplest that fits. `quick`: without a runner-up.
    """
    for verdict in _VERDICTS:
        fitting = [candidate for candidate in found if candidate.fits == verdict]
        if not fitting or (verdict == "unknown" and fitting[0].time is None):
            continue
        best = _smallest(fitting) if goal == "memory" else best_of(fitting)
        assert best is not None
        first = best if goal == "memory" else max(fitting, key=_SPEED)
        reason = _reason(best, fitting, first=first, goal=goal, is_asked=len({one.plan.strategy for one in found}) == 1)
        is_behind = reason is Reason.NEARLY_FASTEST
        return Recommendation(
            index=found.index(best),
            reason=reason,
            best=best,
            slower=1 - _relative(best, first) if is_behind else 0.0,
            fastest=first if is_behind else None,
            simpler=_simpler(best, found, first=first) if goal != "memory" else None,
            runner_up=None if quick else _runner_up(best, found, reason=reason, spec_for=spec_for, optimizer=optimizer),
        )
    is_unknown = all(candidate.fits == "unknown" for candidate in found)
    return Recommendation(index=None, reason=Reason.CAPACITY_UNKNOWN if is_unknown else Reason.NOTHING_FITS)


def best_of(fitting: Sequence[Candidate]) -> Candidate | None:
    """Return the simplest candidate within PAIR_BAND of the fastest; on one rank, which shards nothing, the simplest.

    If some of these leave ROOM, it is one of them. This is what "best" and "recommended" mean everywhere.
    """
    if not fitting:
        return None
    most = max(one.samples_per_s for one in fitting)
    as_fast = [one for one in fitting if one.cluster.num_ranks == 1 or _is_as_fast(one.samples_per_s, most)]
    pool = [one for one in as_fast if one.cluster.num_ranks > 1 and spare(one) >= ROOM] or as_fast
    simplest = min(map(_simplicity, pool))[0]
    # Of one strategy on several meshes, the fastest.
    return max((one for one in pool if _simplicity(one)[0] == simplest), key=_SPEED)


def spare(one: Candidate) -> float:
    """Return the share of the device's memory that a plan leaves; 1 if its capacity is not known."""
    return 1 - one.memory.device_bytes / one.capacity_bytes if one.capacity_bytes else 1.0


def is_simpler(one: Candidate, than: Candidate) -> bool:
    return _simplicity(one)[0] < _simplicity(than)[0]


def _is_as_fast(speed: float, most: float) -> bool:
    return most == 0 or round(1 - speed / most, 2) <= PAIR_BAND


def _simplicity(candidate: Candidate) -> tuple[int, int]:
    assert candidate.plan.mesh is not None
    return _ORDER.index(candidate.plan.strategy), candidate.plan.mesh.replicate


def _smallest(fitting: Sequence[Candidate]) -> Candidate:
    return min(fitting, key=lambda candidate: (candidate.memory.allocated_bytes, _simplicity(candidate)))


def _relative(one: Candidate, other: Candidate) -> float:
    return one.samples_per_s / other.samples_per_s if other.time is not None else 0.0


def _reason(best: Candidate, fitting: Sequence[Candidate], *, first: Candidate, goal: str, is_asked: bool) -> Reason:
    if goal == "memory":
        return Reason.SMALLEST_PEAK
    if best.time is None:
        return Reason.SIMPLEST
    if best.cluster.num_ranks == 1 and len(fitting) > 1:
        return Reason.NOTHING_TO_SHARD
    if first is not best:
        return Reason.NEARLY_FASTEST
    if len(fitting) > 1 or best.fits == "unknown":
        return Reason.FASTEST
    return Reason.ASKED if is_asked else Reason.ONLY_ONE


def _simpler(best: Candidate, found: Sequence[Candidate], *, first: Candidate) -> Simpler | None:
    simpler = [one for one in found if _simplicity(one)[0] < _simplicity(best)[0]]
    if not simpler:
        return None
    one = simpler[0]
    is_too_large = one.fits in ("no", "tight") and one.fits != best.fits
    if not is_too_large and (one.time is None or best.time is None):
        return None
    return Simpler(candidate=one, speed=_relative(one, first), is_too_large=is_too_large)


def _runner_up(
    best: Candidate, found: Sequence[Candidate], *, reason: Reason, spec_for: SpecFor, optimizer: str
) -> RunnerUp | None:
    """Return the simplest candidate that does not fit, or else the fastest other one, unless the reason names it."""
    too_large = [one for one in found if one.fits == "no" and _simplicity(one) < _simplicity(best)]
    if too_large:
        return _to_fit(too_large[0], best, spec_for=spec_for, optimizer=optimizer)
    losers = [one for one in found if one.fits == best.fits and one.plan.strategy != best.plan.strategy]
    if best.time is None or not losers or reason in (Reason.NEARLY_FASTEST, Reason.NOTHING_TO_SHARD):
        return None
    return _to_win(max(losers, key=_SPEED), best)


def _to_fit(one: Candidate, best: Candidate, *, spec_for: SpecFor, optimizer: str) -> RunnerUp:
    speed = _relative(one, best)
    for recompute in (one.plan.recompute, "full"):
        plan = replace(one.plan, recompute=recompute)
        if plan != one.plan and LIMITS[plan.engine].why_not(plan) is not None:
            continue
        spec = spec_for(plan)
        most = largest_batch(spec, plan=plan, cluster=one.cluster, optimizer=optimizer)
        plan = replace(plan, micro_batch=min(most, one.batch))
        if cost(spec, plan=plan, cluster=one.cluster, optimizer=optimizer).fits == "yes":
            return RunnerUp(candidate=one, speed=speed, condition=Condition.PLAN, plan=plan)
    needed = round(one.memory.device_bytes * (1 + one.memory_band))
    return RunnerUp(candidate=one, speed=speed, condition=Condition.CAPACITY, capacity_bytes=needed)


def _to_win(one: Candidate, best: Candidate) -> RunnerUp | None:
    if one.time is None or best.time is None:
        return None
    # Its speed if communication took no time.
    ideal = one.samples_per_s * one.time.step_seconds / (one.time.step_seconds - one.time.exposed_comm_seconds)
    if one.samples_per_s > best.samples_per_s:
        condition = Condition.PREFERENCE
    elif ideal > best.samples_per_s:
        condition = Condition.LINKS
    else:
        condition = Condition.ROOM if one.batch < best.batch else Condition.NONE
    return RunnerUp(candidate=one, speed=_relative(one, best), condition=condition)
