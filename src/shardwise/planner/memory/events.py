"""Memory events: for each row of a step, the changes that the engine's executor makes, and the model's stream."""

from collections.abc import Iterator, Mapping, Sequence

from shardwise.plan import Plan
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.executors.setting import MemoryExecutor
from shardwise.planner.memory.replay import Change, MemoryRow, MoveSaved
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.planner.trace_order import Key, TracedStep, keys_in_order
from shardwise.program import StepProgram, Trigger
from shardwise.program.rules.host import saved_before
from shardwise.spec import ROOT
from shardwise.spec.law import Law, Line
from shardwise.spec.step import BEFORE_FORWARD, Act, Stream


def memory_rows(
    program: StepProgram,
    executor: MemoryExecutor,
    *,
    peaks: Sequence[tuple[Key, StreamPeak]],
    in_order: bool,
    plan: Plan,
    weights: Mapping[str, int],
    rules: MemoryRules,
    saved: Mapping[str, Line],
) -> Iterator[MemoryRow]:
    """Yield the rows in the order of the trace, whose streams have these peaks, or else in that of the program.

    saved   what units save in host memory (Job.saved_by_units)
    """
    by_key = dict(peaks)
    offload = _Offload(saved) if saved else None
    step = TracedStep(program, executor, in_order=in_order)
    for key in keys_in_order(by_key, program=program):
        trigger, unit, _ = key
        weight = weights.get(unit, 1)
        executor.changes = []
        if offload is not None:
            executor.changes += offload.at(key)
        if plan.recompute_of(unit) != "none":
            executor.changes += _random_state(trigger, weight * rules.random_state_bytes)
        step.reach(key)
        yield MemoryRow(
            label=f"{trigger} {unit}", unit=unit, changes=executor.changes, peak=by_key.get(key), repeats=weight
        )


def _random_state(trigger: str, num_bytes: int) -> Iterator[Change]:
    """Yield the change by the random state that is saved for recomputation."""
    if num_bytes and trigger == Trigger.BEFORE_FORWARD.value:
        yield Change("other", num_bytes)
    elif num_bytes and trigger == Trigger.GRADS_READY.value:
        yield Change("other", -num_bytes)


def saved_of_root(streams: Sequence[tuple[Key, Stream]], *, seq: int | None) -> int:
    """Return the bytes of what the root makes before its units, and these save, for no sample: rotary tables.

    All units save the same ones, so they wait in host memory once; the last unit in backward releases them.
    """
    released = (law.line(seq) for law in released_of_root(streams))
    return sum(line.const for line in released if not line.per_sample)


def released_of_root(streams: Sequence[tuple[Key, Stream]]) -> list[Law]:
    """Return the sizes of what the root makes before its units, and these release."""
    made = {
        event.ordinal
        for (trigger, unit, _), stream in streams
        if (trigger, unit) == (BEFORE_FORWARD, ROOT)
        for event in stream.events
    }
    return [
        event.num_bytes
        for (_, unit, _), stream in streams
        if unit != ROOT
        for event in stream.events
        if event.act is Act.DIED and event.owner == ROOT and event.ordinal in made
    ]


class _Offload:
    """A unit's saved activations leave when the next unit's forward ends, and return before the next unit's backward.

    The first unit of backward keeps its own (engine/activations/offload.py).
    """

    def __init__(self, saved: Mapping[str, Line]) -> None:
        self._saved = saved

    def at(self, key: Key) -> Iterator[MoveSaved]:
        trigger, unit, _ = key
        earlier = saved_before(unit, saving=list(self._saved))
        if earlier is not None and trigger in (Trigger.AFTER_FORWARD.value, Trigger.BEFORE_BACKWARD.value):
            to_host = trigger == Trigger.AFTER_FORWARD.value
            yield MoveSaved(unit=earlier, num_bytes=self._saved[earlier], to_host=to_host)
