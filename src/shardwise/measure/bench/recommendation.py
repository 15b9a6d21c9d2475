"""Recommends a case, from measured numbers alone. No torch here.

It is the fastest case. If several cannot be ranked (spread.py), it is the simplest of those that no case clearly beats:
the one with fewer moving parts. If none of them is simpler, it is the one with the shortest step if they are about
equally fast, and none if the times are too noisy. Our own engine is not preferred, and does not count as a moving part,
since every case has an engine. The sentence compares speed with a case of the same mode (captured with captured), if
there is one.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.base.vocabulary.quantities import fixed_text, significant, table_unit
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.bench.spread import SpeedRelation, Spread, relation
from shardwise.plan.placement import AUTO, STRATEGIES

# Memory savings below this factor are not mentioned.
_WORTHWHILE = 1.05
_SHARES = {2: "half", 3: "a third", 4: "a quarter"}
_MOST_NAMED = 4
_OPTIM, _GRADS, _PARAMS = "sharded optimizer state", "sharded gradients", "sharded parameters"
_REGATHER, _PER_UNIT = "second gather", "plan per unit"
_GRAPH, _COMPILER = "CUDA graph", "compiler"
_MODES = {"captured": (_GRAPH,), "compiled": (_GRAPH, _COMPILER)}


def recommended(bench: Bench) -> Bench:
    """Return the bench with a recommendation; without one if its cases did not do the same training, none ran, or the
    times are too noisy to rank.
    """
    ran = bench.ran
    if not bench.equivalence.agrees:
        names = ", ".join(dict.fromkeys(difference.case for difference in bench.equivalence.differences))
        return replace(bench, recommended=None, why=f"Not ranked: not all did the same training ({names}).")
    if not ran:
        return replace(bench, recommended=None, why="Nothing ran.")
    left = contenders(ran)
    if len(left) > 1:
        return replace(bench, recommended=None, why=_too_noisy(bench, left, ran))
    return replace(bench, recommended=bench.cases.index(left[0]), why=_why(bench, left[0], ran))


def contenders(ran: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the case to use, or several if the times are too noisy to rank them and none is simpler."""
    unbeaten = [case for case in ran if not any(_is_faster(other, case) for other in ran)]
    simplest = [case for case in unbeaten if not any(is_simpler(other, case) for other in unbeaten)]
    simplest.sort(key=lambda case: case.seconds)
    noisy = [case for case in simplest[1:] if _relation(case, simplest[0]) is SpeedRelation.NOISY]
    return [simplest[0], *noisy]


def moving_parts(case: CaseResult) -> tuple[str, ...]:
    """Return the parts in words, always in the same order."""
    if case.strategy == AUTO:
        # The solver chooses which of them its plan has, so a reader has to know all.
        return _OPTIM, _GRADS, _PARAMS, _REGATHER, _PER_UNIT, *_MODES.get(case.mode, ())
    placement = STRATEGIES[case.strategy]
    has = {
        _OPTIM: placement.optim.is_sharded,
        _GRADS: placement.grads.is_sharded,
        _PARAMS: placement.params.is_sharded,
        _REGATHER: placement.reshard_after_forward,
    }
    return *(part for part, is_there in has.items() if is_there), *_MODES.get(case.mode, ())


def is_simpler(one: CaseResult, other: CaseResult) -> bool:
    """Return whether the parts of `one` are a proper subset of the other's."""
    return set(moving_parts(one)) < set(moving_parts(other))


def missing_parts(one: CaseResult, other: CaseResult) -> str:
    """Return what the simpler one lacks: "no sharded gradients or CUDA graph"."""
    parts = [part for part in moving_parts(other) if part not in moving_parts(one)]
    return "no " + " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _seconds(case: CaseResult) -> Spread:
    assert case.step_seconds is not None
    return case.step_seconds


def _relation(one: CaseResult, other: CaseResult) -> SpeedRelation:
    return relation(_seconds(one), _seconds(other))


def _is_faster(one: CaseResult, other: CaseResult) -> bool:
    return one.seconds < other.seconds and _relation(one, other) is SpeedRelation.APART


def _too_noisy(bench: Bench, left: Sequence[CaseResult], ran: Sequence[CaseResult]) -> str:
    names = [f"{case.name} ({_spread(case)})" for case in left[:_MOST_NAMED]]
    if len(left) > _MOST_NAMED:
        names.append(f"{len(left) - _MOST_NAMED} more")
    text = (
        f"Too noisy to rank: the step times of {', '.join(names[:-1])} and {names[-1]} overlap. Run more rounds "
        "(--rounds), or on a quieter machine."
    )
    smallest = _smallest(ran)
    return text if smallest is None else f"{text} Least memory: {_held(bench, smallest)}."


def _why(bench: Bench, best: CaseResult, ran: Sequence[CaseResult]) -> str:
    """Explain the choice in at most two sentences: its speed, and which case needs less memory."""
    first = f"Use {best.name}: {_rate(bench, best)}{_compared(best, ran)}{_room(bench, best)}."
    smallest = _smallest(ran)
    if not best.allocated_bytes or smallest is None or best.peak_bytes < _WORTHWHILE * smallest.peak_bytes:
        return first
    return f"{first} If memory is tight: {_held(bench, smallest, than=best)}."


def _compared(best: CaseResult, ran: Sequence[CaseResult]) -> str:
    """Compare the best case with the fastest other one of its mode, or else of any mode."""
    others = sorted((case for case in ran if case is not best), key=lambda case: case.seconds)
    if not others:
        return ", the only one that ran"
    rival = next((case for case in others if case.mode == best.mode), others[0])
    name = rival.name if rival.mode == best.mode else f"{rival.name}, which is {rival.mode}"
    simpler = f", and simpler: {missing_parts(best, rival)}" if is_simpler(best, rival) else ""
    match _relation(best, rival):
        case SpeedRelation.APART:
            return f", {rival.seconds / best.seconds:.2f} times as fast as {name}"
        case SpeedRelation.ALIKE:
            return f", about as fast as {name}{simpler}"
        case SpeedRelation.NOISY:
            return f", too noisy to rank against {name} ({_spread(best)} and {_spread(rival)}){simpler}"


def _spread(case: CaseResult) -> str:
    off = _seconds(case).off
    return "measured once" if off is None else f"±{off:.0%}"


def _room(bench: Bench, best: CaseResult) -> str:
    if bench.capacity_bytes is None or not best.allocated_bytes:
        return ""
    return f"; its peak of {_size(best.peak_bytes)} per rank fits the device's {_size(bench.capacity_bytes)}"


def _smallest(ran: Sequence[CaseResult]) -> CaseResult | None:
    """Return the case with the lowest peak; of several with about the same peak, the fastest."""
    known = [case for case in ran if case.allocated_bytes]
    if not known:
        return None
    least_bytes = min(case.peak_bytes for case in known)
    return min((case for case in known if case.peak_bytes < _WORTHWHILE * least_bytes), key=lambda case: case.seconds)


def _held(bench: Bench, case: CaseResult, *, than: CaseResult | None = None) -> str:
    """Describe the peak of a case, and its share of another's peak."""
    share = "" if than is None else f", {_share(case.peak_bytes / than.peak_bytes)} as much"
    return f"{case.name} peaks at {_size(case.peak_bytes)} per rank{share}, at {_rate(bench, case)}"


def _share(share: float) -> str:
    return next((words for times, words in _SHARES.items() if abs(share * times - 1) < 0.02), f"{share:.0%}")


def _rate(bench: Bench, case: CaseResult) -> str:
    tokens, samples = bench.tokens_per_s(case), bench.samples_per_s(case)
    value, unit = (tokens, "tokens/s") if tokens is not None else (samples, "samples/s")
    assert value is not None
    return f"{significant(value)} {unit}"


def _size(num_bytes: int) -> str:
    return fixed_text(num_bytes, unit=table_unit([num_bytes]))
