"""The planner's recommendation in sentences: which plan, why, and what would have to change for another one."""

from collections.abc import Iterator, Sequence

from shardwise.base.vocabulary.quantities import GIB, fixed, fixed_text, significant
from shardwise.planner.search.candidates import Candidate, fits_host
from shardwise.planner.search.recommend import (
    PAIR_BAND,
    Condition,
    Reason,
    Recommendation,
    RunnerUp,
    Simpler,
    is_simpler,
    spare,
)
from shardwise.planner.search.request import MOST_TIMES

# What is said of a recommended candidate that may not fit.
_DOUBTS = {"tight": "borderline", "unknown": "whether it fits is not known"}
# Exposed communication below this share of a step is called hidden.
_HIDDEN = 0.05


def verdict(found: Recommendation, *, why: str) -> str:
    """Return the line below a table of candidates."""
    if found.best is not None:
        return f"Recommended: {name_of(found.best)}, {why}."
    return f"{why[0].upper()}{why[1:]}{'' if why.endswith(':') else '.'}"


def reasons(found: Recommendation) -> str:
    """Say why this candidate is recommended, or why none is."""
    best = found.best
    if best is None:
        if found.reason is Reason.CAPACITY_UNKNOWN:
            return "no recommendation: the memory of the device is not known"
        return "nothing fits"
    text = "; ".join(_clauses(found, best))
    return f"{text}. {_runner_up(found.runner_up, found, best=best)}" if found.runner_up is not None else text


def no_fit(found: Sequence[Candidate], *, has_ways: bool) -> str:
    """Say that nothing fits, and whether there are ways out. `found`: the candidates that do not fit, at least one."""
    ways = "what does, the smallest change first:" if has_ways else f"also not on {MOST_TIMES:,} times the devices"
    return f"nothing fits{_too_little_host_memory(found)}; {ways}"


def _too_little_host_memory(found: Sequence[Candidate]) -> str:
    """Return the candidate that needs the least host memory of those that need too much; "" if there is none."""
    short = [one for one in found if not fits_host(one.memory.host_bytes, cluster=one.cluster)]
    if not short:
        return ""
    least = min(short, key=lambda one: one.node_host_bytes)
    room = fixed_text(least.cluster.host_bytes or 0, unit=GIB)
    return f": {name_of(least)} needs {fixed_text(least.node_host_bytes, unit=GIB)} of host memory per node, of {room}"


def name_of(candidate: Candidate) -> str:
    """Return the strategy, and the mesh if both of its axes are used."""
    mesh = candidate.plan.mesh
    assert mesh is not None
    return candidate.name + (f"{candidate.plan.across_text} on {mesh}" if mesh.replicate > 1 else "")


def _clauses(found: Recommendation, best: Candidate) -> Iterator[str]:
    if best.fits in _DOUBTS:
        yield _DOUBTS[best.fits]
    match found.reason:
        case Reason.SMALLEST_PEAK:
            yield f"the smallest peak, {fixed_text(best.memory.device_bytes, unit=GIB)}"
        case Reason.SIMPLEST:
            yield "the simplest strategy that fits; time is not predicted"
        case Reason.NOTHING_TO_SHARD:
            yield "the simplest: one device has nothing to shard"
        case Reason.NEARLY_FASTEST:
            assert found.fastest is not None
            yield _nearly_fastest(best, fastest=found.fastest, slower=found.slower)
        case Reason.ASKED:
            yield from ["it fits"] if best.fits == "yes" else []
        case Reason.ONLY_ONE:
            yield "the only one that fits" if best.fits == "yes" else "no other fits"
        case _:
            yield "the fastest" if best.fits == "unknown" else "the fastest that fits"
    if found.reason in (Reason.NEARLY_FASTEST, Reason.FASTEST, Reason.ONLY_ONE, Reason.ASKED):
        yield _communication(best)
    if found.simpler is not None:
        yield _simpler(found.simpler, best=best)


def _nearly_fastest(best: Candidate, *, fastest: Candidate, slower: float) -> str:
    name, why = name_of(fastest), "and simpler"
    if not is_simpler(best, fastest):
        why = f"and leaves {spare(best):.0%} of the memory instead of {spare(fastest):.0%}"
    if round(slower, 2) == 0:
        return f"as fast as {name} {why}"
    return f"{slower:.0%} slower than {name}, the fastest, {why} ({PAIR_BAND:.0%} or less is within the error)"


def _communication(best: Candidate) -> str:
    assert best.time is not None
    exposed, step = best.time.exposed_comm_seconds, best.time.step_seconds
    if best.cluster.num_ranks == 1:
        return "one device does not communicate"
    share = f"{significant(exposed)} of {significant(step)} s"
    if exposed < _HIDDEN * step:
        return f"communication is hidden behind compute ({share} exposed)"
    return f"{share} are spent waiting for communication"


def _simpler(simpler: Simpler, *, best: Candidate) -> str:
    one = simpler.candidate
    if simpler.is_too_large:
        assert one.capacity_bytes is not None
        needs, has = fixed_text(one.memory.device_bytes, unit=GIB), fixed(one.capacity_bytes, unit=GIB)
        return f"{one.plan.strategy} needs {needs}, the device has {has}"
    if round(1 - simpler.speed, 2) <= PAIR_BAND and spare(one) < spare(best):
        return f"{one.plan.strategy} leaves {spare(one):.0%} of the memory"
    at_batch = f" with micro-batch {one.batch}, the most that fits" if one.batch < best.batch else ""
    return f"{one.plan.strategy} is {1 - simpler.speed:.0%} slower{at_batch}"


def _runner_up(runner_up: RunnerUp, found: Recommendation, *, best: Candidate) -> str:
    one, name = runner_up.candidate, name_of(runner_up.candidate)
    slower = f"{name} is {1 - runner_up.speed:.0%} slower"
    advantage = "is simpler" if is_simpler(best, one) else "leaves more memory"
    if found.reason is Reason.SMALLEST_PEAK:
        advantage = "has the smaller peak"
    match runner_up.condition:
        case Condition.PLAN:
            assert runner_up.plan is not None
            recompute, batch = runner_up.plan.recompute, runner_up.plan.micro_batch
            also = f"--recompute {recompute} and " if recompute != one.plan.recompute else ""
            return f"{name} would fit with {also}micro-batch {batch}"
        case Condition.CAPACITY:
            assert runner_up.capacity_bytes is not None
            return f"{name} would fit on devices of {fixed_text(runner_up.capacity_bytes, unit=GIB, places=0)}"
        case _ if round(runner_up.speed, 2) == 1:
            return f"{name} is equally fast; {name_of(best)} {advantage}"
        case Condition.PREFERENCE:
            return f"{name} is {runner_up.speed - 1:.0%} faster; {name_of(best)} {advantage}"
        case Condition.LINKS:
            assert one.time is not None
            exposed = significant(one.time.exposed_comm_seconds)
            return f"{slower}; with faster links, which hide its {exposed} s of communication, it would be the fastest"
        case Condition.ROOM:
            return f"{slower}: its micro-batch is at most {one.batch}"
        case Condition.NONE:
            return f"{slower}, and faster links would not change that"


def in_host_memory(found: Candidate) -> str:
    """Return what a plan keeps in host memory, and how much of a node's it is, in brackets; "" if nothing."""
    plan = found.plan
    places = {"activations": plan.offload_activations, "optimizer states": plan.offload_states}
    kept = [name for name, is_kept in places.items() if is_kept]
    speed = ", at a speed that is not predicted" if found.time is None else ""
    room = fixed_text(found.node_host_bytes, unit=GIB)
    return f" ({' and '.join(kept)} in host memory, {room} per node{speed})" if kept else ""
