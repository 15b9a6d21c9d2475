"""Which case of a bench to use, and why, from measured numbers alone. No torch here.

The fastest; of those that cannot be told apart from it the simplest: Shardwise's own engine before others, eager before
captured before compiled, and then ddp < zero1 < zero2 < shard_grad_op < fsdp < auto. Two cannot be told apart if the
interquartile ranges of their step times overlap, or their medians differ by less than 3%: as much as two starts of the
same processes may differ. Its speed is compared with cases of its own mode, captured with captured, if there are any.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.bench.modes import MODES
from shardwise.bench.results import Bench, CaseResult, Spread
from shardwise.placement import AUTO, STRATEGIES
from shardwise.quantities import fixed_text, significant, table_unit

# Memory savings below this factor are not mentioned.
_WORTHWHILE = 1.05
_ALIKE = 1.03
_OURS = ("shardwise", "captured", "compiled")


def recommended(bench: Bench) -> Bench:
    """The bench with its recommendation; without one where its cases did not do the same training, or none ran."""
    ran = [case for case in bench.cases if case.ran]
    if not bench.equivalence.agrees:
        names = ", ".join(dict.fromkeys(difference.case for difference in bench.equivalence.differences))
        return replace(bench, recommended=None, why=f"Not ranked: not all did the same training ({names}).")
    if not ran:
        return replace(bench, recommended=None, why="Nothing ran.")
    best = choose(ran)
    return replace(bench, recommended=bench.cases.index(best), why=_why(bench, best, ran))


def choose(ran: Sequence[CaseResult]) -> CaseResult:
    """The simplest of those that are as fast as the fastest."""
    fastest = min(ran, key=lambda case: _seconds(case).median)
    as_fast = [case for case in ran if case is fastest or _alike(_seconds(case), _seconds(fastest))]
    return min(as_fast, key=_simplicity)


def _simplicity(case: CaseResult) -> tuple[bool, int, int]:
    return case.engine not in _OURS, MODES.index(case.mode), [*STRATEGIES, AUTO].index(case.strategy)


def _alike(one: Spread, other: Spread) -> bool:
    overlap = one.middle[0] <= other.middle[1] and other.middle[0] <= one.middle[1]
    return overlap or max(one.median, other.median) < _ALIKE * min(one.median, other.median)


def _seconds(case: CaseResult) -> Spread:
    assert case.step_seconds is not None
    return case.step_seconds


def _why(bench: Bench, best: CaseResult, ran: Sequence[CaseResult]) -> str:
    """At most two sentences: its speed compared with another's, and which case holds less."""
    first = f"Use {best.name}: {_rate(bench, best)}{_compared(best, ran)}{_room(bench, best)}."
    if not best.allocated_bytes:
        return first
    known = [case for case in ran if case.allocated_bytes]
    least_bytes = min(case.peak_bytes for case in known)
    smallest = min((case for case in known if case.peak_bytes < _WORTHWHILE * least_bytes), key=_simplicity)
    if best.peak_bytes < _WORTHWHILE * smallest.peak_bytes:
        return first
    return (
        f"{first} If memory is tight: {smallest.name} peaks at {_size(smallest.peak_bytes)} per rank, "
        f"{best.peak_bytes / smallest.peak_bytes:.1f} times less, at {_rate(bench, smallest)}."
    )


def _compared(best: CaseResult, ran: Sequence[CaseResult]) -> str:
    """Compared with the fastest case of its mode, if that is another; else with the next one. Of another mode, if there
    is none.
    """
    others = sorted((case for case in ran if case is not best), key=lambda case: _seconds(case).median)
    if not others:
        return ", the only one that ran"
    rival = next((case for case in others if case.mode == best.mode), others[0])
    name = rival.name if rival.mode == best.mode else f"{rival.name}, which is {rival.mode}"
    times = _seconds(rival).median / _seconds(best).median
    if _alike(_seconds(best), _seconds(rival)):
        simpler = "" if times >= 1 else ", and simpler"
        return f", about as fast as {name}{simpler}"
    return f", {times:.2f} times as fast as {name}"


def _room(bench: Bench, best: CaseResult) -> str:
    if bench.capacity_bytes is None or not best.allocated_bytes:
        return ""
    return f", and its peak of {_size(best.peak_bytes)} per rank fits the device's {_size(bench.capacity_bytes)}"


def _rate(bench: Bench, case: CaseResult) -> str:
    tokens, samples = bench.tokens_per_s(case), bench.samples_per_s(case)
    value, unit = (tokens, "tokens/s") if tokens is not None else (samples, "samples/s")
    assert value is not None
    return f"{significant(value)} {unit}"


def _size(num_bytes: int) -> str:
    return fixed_text(num_bytes, unit=table_unit([num_bytes]))
