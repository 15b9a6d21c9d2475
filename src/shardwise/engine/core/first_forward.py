"""The first forward: which units are called, on any rank, and in which order.

Ranks may call different units (a branch that depends on the data), and a gather needs every rank. So in the first
forward the ranks tell each other before each gather what they want next, and all take part in all of it; one that
has come to the end of its forward continues to take part until all have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from shardwise.engine.core.unit import Unit
from shardwise.program import Row, StepProgram
from shardwise.program.rules.context import StepContext
from shardwise.program.rules.demand import agreed, released
from shardwise.program.rules.learning import catch_up
from shardwise.program.spec import ANNOUNCED, NONE, ModelSpec, most_demanding

_END = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One rank's first forward: its calls, how backward will come to each unit, and what is gathered now."""

    calls: tuple[str, ...]
    backward: Mapping[str, str]
    gathered: frozenset[str]

    @property
    def text(self) -> str:
        """Describe it; equal observations have equal texts."""
        return repr((self.calls, sorted(self.backward.items()), sorted(self.gathered)))


class FirstForward:
    """Gathers on demand, in step with the other ranks.

    distinct   a word → the ranks' different words
    run        runs a row
    before     the forward before, if no backward has come since: it may go through both
    ended      whether all ranks have come to the end of it, and need no gather of each other
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        *,
        context: StepContext,
        distinct: Callable[[str], list[str]],
        run: Callable[[Row], None],
        before: "FirstForward | None" = None,
    ) -> None:
        self.units = units
        self._distinct = distinct
        self._context, self._run = context, run
        self.calls: list[str] = []
        self.backward: dict[str, str] = {} if before is None else dict(before.backward)
        self.ended = not any(map(context.sharded, context.placements))

    def note_call(self, unit: Unit) -> int:
        """Count a call of a unit; return its number among the unit's calls."""
        self.calls.append(unit.name)
        return self.calls.count(unit.name) - 1

    def places_in(self, order: Sequence[str]) -> dict[tuple[str, int], int]:
        """(unit, call) of this rank → which call of the unit it is in an order that holds all ranks' calls."""
        places: dict[tuple[str, int], int] = {}
        own: Counter[str] = Counter()
        passed: Counter[str] = Counter()
        calls = iter(self.calls)
        mine = next(calls, None)
        for name in order:
            if name == mine:
                places[name, own[name]] = passed[name]
                own[name] += 1
                mine = next(calls, None)
            passed[name] += 1
        return places

    def want(self, unit: Unit) -> None:
        """Gather a unit, and on the way what other ranks want."""
        while not unit.whole:
            self._round(unit.name)

    def note_backward(self, unit: Unit, how: str) -> None:
        self.backward[unit.name] = most_demanding(how, self.backward.get(unit.name, NONE))

    def end(self) -> Observation:
        """This rank's forward is over; returns when everyone's is."""
        while self._round(_END):
            pass
        self.ended = True
        gathered = frozenset(unit.name for unit in self.units.values() if unit.whole)
        return Observation(calls=tuple(self.calls), backward=self.backward, gathered=gathered)

    def catch_up(self, program: StepProgram, *, seen: Sequence[Observation]) -> Row:
        """Return the row that brings this rank to the state after forward of the program that was learned."""
        by_all = frozenset.intersection(*(other.gathered for other in seen))
        gathered = {unit.name for unit in self.units.values() if unit.whole}
        return catch_up(program, gathered=gathered, gathered_by_all=by_all, context=self._context)

    def _round(self, wish: str) -> bool:
        """One exchange; whether anybody wanted anything."""
        wishes = sorted(other for other in self._distinct(wish) if other != _END)
        for name in wishes:
            was_gathered = self.units[name].whole
            self._run(agreed(name, self._context))
            if name != wish and not was_gathered:
                self._run(released(name))
        return bool(wishes)


def learned(
    spec: ModelSpec, *, seen: Sequence[Observation], sharded: Iterable[str], trainable: AbstractSet[str]
) -> ModelSpec:
    """Return the spec with what all ranks together saw, and with the parameters that are trained now.

    A sharded unit that no rank called has its place all the same, so that every rank gathers it should one of them
    call it in a later step.
    """
    order: list[str] = []
    names = [unit.name for unit in spec.units]
    for calls in dict.fromkeys(observation.calls for observation in seen):
        order = _merge(order, calls, names=names)
    uncalled = [name for name in names if name in set(sharded) and name not in order]
    for name in uncalled:
        before = [other for other in names[: names.index(name)] if other in order]
        place = max(index for index, other in enumerate(order) if other == before[-1]) if before else -1
        order.insert(place + 1, name)
    answers = {name: [other.backward[name] for other in seen if name in other.backward] for name in names}
    units = tuple(
        replace(
            unit,
            backward=most_demanding(*answers[unit.name]) if answers[unit.name] else ANNOUNCED,
            params=tuple(param.trained_now(param.name in trainable) for param in unit.params),
        )
        for unit in spec.units
    )
    return replace(spec, call_order=tuple(order), units=units)


def _merge(one: Sequence[str], other: Sequence[str], *, names: Sequence[str]) -> list[str]:
    """An order that holds both: what is common once, what is not one after the other, as the model names them."""
    merged: list[str] = []
    for tag, start, stop, other_start, other_stop in SequenceMatcher(a=one, b=other, autojunk=False).get_opcodes():
        parts = [one[start:stop]] if tag == "equal" else [one[start:stop], other[other_start:other_stop]]
        for part in sorted(filter(None, parts), key=lambda part: names.index(part[0])):
            merged += part
    return merged
