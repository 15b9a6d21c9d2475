"""Which candidate to take, why, and what would have to change for another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.engine_limits import LIMITS
from shardwise.placement import STRATEGIES
from shardwise.planner.search.candidates import Candidate, SpecFor, cost, largest_batch
from shardwise.quantities import GIB, fixed, fixed_text, significant

PAIR_BAND = 0.05
"""How far two predictions on the same cluster may be off each other: most of what one is off, the other is too."""

# Verdicts on what can be taken, the best first, and what is to be said of it.
_DOUBTS: dict[str, list[str]] = {"yes": [], "tight": ["it may fit"], "unknown": ["whether it fits is not known"]}

_ORDER = list(STRATEGIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`index` of the candidate to take, None where none fits; `why` in a sentence or two."""

    index: int | None
    why: str


def choose(found: Sequence[Candidate], *, goal: str, spec_for: SpecFor, optimizer: str) -> Choice:
    """The fastest that fits; of those that cannot be told apart the simplest. For memory's sake, the smallest.

    Where time cannot be predicted: the simplest that fits.
    """
    for verdict in _DOUBTS:
        fitting = [candidate for candidate in found if candidate.fits == verdict]
        if not fitting or (verdict == "unknown" and fitting[0].time is None):
            continue
        best = _smallest(fitting) if goal == "memory" else fastest(fitting)
        assert best is not None
        reasons = [_reason(best, fitting, goal=goal), *_why_not_simpler(best, found, goal=goal)]
        other = _other_way(best, found, spec_for=spec_for, optimizer=optimizer)
        why = "; ".join([*_DOUBTS[verdict], *reasons])
        return Choice(index=found.index(best), why=why + (f". {other}" if other else ""))
    if all(candidate.fits == "unknown" for candidate in found):
        return Choice(index=None, why="whether it fits is not known: the device's capacity is not")
    return Choice(index=None, why="nothing fits")


def _simplicity(candidate: Candidate) -> tuple[int, int]:
    assert candidate.plan.mesh is not None
    return _ORDER.index(candidate.plan.strategy), candidate.plan.mesh.replicate


def _smallest(fitting: Sequence[Candidate]) -> Candidate:
    return min(fitting, key=lambda candidate: (candidate.memory.allocated_bytes, _simplicity(candidate)))


def _speed(candidate: Candidate) -> float:
    return candidate.time.samples_per_s if candidate.time is not None else 0.0


def fastest(fitting: Sequence[Candidate]) -> Candidate | None:
    """The fastest; of those within PAIR_BAND of it the simplest."""
    if not fitting:
        return None
    most = max(map(_speed, fitting))
    as_fast = [one for one in fitting if _speed(one) * (1 + PAIR_BAND) >= most]
    simplest = min(map(_simplicity, as_fast))[0]
    # Of one strategy on several meshes, the faster.
    return max((one for one in as_fast if _simplicity(one)[0] == simplest), key=_speed)


def name_of(candidate: Candidate) -> str:
    """The strategy, and the mesh where it is not just all ranks in a row."""
    mesh = candidate.plan.mesh
    assert mesh is not None
    return candidate.plan.strategy + (f" on {mesh}" if mesh.replicate > 1 else "")


def _reason(best: Candidate, fitting: Sequence[Candidate], *, goal: str) -> str:
    if goal == "memory":
        return f"the smallest peak, {fixed_text(best.memory.device_bytes, unit=GIB)}"
    if best.time is None:
        return "the simplest strategy that fits; time is not predicted"
    first = max(fitting, key=_speed)
    if first is not best:
        ahead = _speed(first) / _speed(best) - 1
        lead = f"the simplest within {PAIR_BAND:.0%} of the fastest ({name_of(first)}, {ahead:.0%} ahead)"
    else:
        lead = (
            "the fastest"
            if best.fits == "unknown"
            else f"the {'fastest' if len(fitting) > 1 else 'only one'} that fits"
        )
    return f"{lead}; {_communication(best)}"


def _communication(best: Candidate) -> str:
    assert best.time is not None
    exposed, step = best.time.exposed_comm_seconds, best.time.step_seconds
    if best.cluster.num_ranks == 1:
        return "one rank has nobody to communicate with"
    if exposed < 0.05 * step:
        return f"communication is hidden behind compute ({significant(exposed)} of {significant(step)} s exposed)"
    return f"{significant(exposed)} of {significant(step)} s are exposed communication"


def _why_not_simpler(best: Candidate, found: Sequence[Candidate], *, goal: str) -> list[str]:
    """Of the simplest strategy that lost, what it lost by."""
    simpler = [one for one in found if _simplicity(one)[0] < _simplicity(best)[0]]
    if not simpler or goal == "memory":
        return []
    one = simpler[0]
    if one.fits in ("no", "tight") and one.fits != best.fits:
        assert one.capacity_bytes is not None
        needs, has = fixed_text(one.memory.device_bytes, unit=GIB), fixed(one.capacity_bytes, unit=GIB)
        return [f"{one.plan.strategy} needs {needs}, the device has {has}"]
    if one.time is None or best.time is None:
        return []
    return [f"{one.plan.strategy} is {1 - _speed(one) / _speed(best):.0%} slower{_at_batch(one, best)}"]


def _at_batch(one: Candidate, best: Candidate) -> str:
    return f" with micro-batch {one.batch}, the most that fits" if one.batch < best.batch else ""


def _other_way(best: Candidate, found: Sequence[Candidate], *, spec_for: SpecFor, optimizer: str) -> str | None:
    """What would have to change for the runner-up: the simplest that does not fit, or the fastest that lost."""
    too_large = [one for one in found if one.fits == "no" and _simplicity(one) < _simplicity(best)]
    if too_large:
        return _to_fit(too_large[0], spec_for=spec_for, optimizer=optimizer)
    losers = [one for one in found if one.fits == best.fits and one.plan.strategy != best.plan.strategy]
    if best.time is None or not losers:
        return None
    return _to_win(max(losers, key=_speed), best)


def _to_fit(one: Candidate, *, spec_for: SpecFor, optimizer: str) -> str:
    name = name_of(one)
    for recompute in (one.plan.recompute, "full"):
        plan = replace(one.plan, recompute=recompute)
        if plan != one.plan and LIMITS[plan.engine].why_not(plan) is not None:
            continue
        spec = spec_for(plan)
        most = largest_batch(spec, plan=plan, cluster=one.cluster, optimizer=optimizer)
        plan = replace(plan, micro_batch=min(most, one.batch))
        if cost(spec, plan=plan, cluster=one.cluster, optimizer=optimizer).fits == "yes":
            also = f"--recompute {recompute} and " if recompute != one.plan.recompute else ""
            return f"{name} would fit with {also}micro-batch {plan.micro_batch}"
    needed = one.memory.device_bytes * (1 + one.memory_band)
    return f"{name} would fit on devices of {fixed_text(needed, unit=GIB, places=0)}"


def _to_win(one: Candidate, best: Candidate) -> str | None:
    """A candidate that lost, and by what."""
    if one.time is None or best.time is None:
        return None
    name, ratio = name_of(one), _speed(one) / _speed(best)
    if ratio > 1:
        return f"{name} wins wherever its {ratio - 1:.0%} count more than a simpler plan"
    # What it would do with the wire for nothing.
    ideal = _speed(one) * one.time.step_seconds / (one.time.step_seconds - one.time.exposed_comm_seconds)
    if ideal > _speed(best):
        exposed = significant(one.time.exposed_comm_seconds)
        return f"{name}, {1 - ratio:.0%} slower, would win over links that hide its {exposed} s"
    if one.batch < best.batch:
        return f"{name}, {1 - ratio:.0%} slower, would need room for micro-batch {best.batch}"
    return f"{name} is {1 - ratio:.0%} slower with the same micro-batch, over any links"
