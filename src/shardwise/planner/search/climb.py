"""Hill climbing: changes a dial in one thing or two at a time, as long as that improves it. No torch.

Of a row of equal units with equal choices only the first and the last are changed: the others cost the same. In a small
model every change is replayed. In a large one only the most promising are, assuming that changing one unit of n has an
n-th of the effect of changing all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import inf
from typing import NamedTuple

from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.search.dial import Choice, Dial
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches

# A model with more units is large.
_FEW_UNITS = 10
# Changes of one unit, and of two, that are replayed per round.
_NUM_SINGLES, _NUM_PAIRS = 4, 6
# Small models: dials that are followed at once, and rounds in a row without improvement.
_WIDTH, _PATIENCE = 6, 2
_MOST_REPLAYS = 600
_PREFETCHES = (0, 1, 2)


class _Marginal(NamedTuple):
    """A changed dial, its additional bytes, and its additional seconds per sample."""

    dial: Dial
    more_bytes: float
    lost_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """`score`: the value to maximize; -inf for a dial whose tensors exceed `limit`."""

    costs: DialCosts
    options: dict[Mesh, list[Choice]]
    batches: MicroBatches
    score: Callable[[Dial], float]
    limit: float

    def climbed(self, starts: Sequence[Dial]) -> Dial:
        """Return the best dial found from the best of `starts`.

        In a small model several dials are followed at once, also through changes that do not help by themselves.
        """
        width, patience = (_WIDTH, _PATIENCE) if self._is_small else (1, 0)
        beam = sorted(starts, key=self.score, reverse=True)[:width]
        best, seen, num_idle = beam[0], set(beam), 0
        most_replays = self.costs.num_replays + _MOST_REPLAYS
        while beam and num_idle <= patience and self.costs.num_replays < most_replays:
            # In order: that of a set differs from process to process, and of equal dials the first is taken.
            changed = [one for one in dict.fromkeys(chain(*map(self._changes, beam))) if one not in seen]
            seen.update(changed)
            fitting = [dial for dial in changed if self.score(dial) > -inf]
            beam = sorted(fitting, key=self.score, reverse=True)[:width]
            if not beam or self.score(beam[0]) <= self.score(best):
                beam = [*self._pairs(best, seen=seen), *beam]
            better = max(beam, key=self.score, default=best)
            num_idle = 0 if self.score(better) > self.score(best) else num_idle + 1
            best = max(best, better, key=self.score)
        return best

    def shrunk(self, starts: Sequence[Dial]) -> Dial:
        """Return the smallest dial found from the smallest of `starts` by single changes; `score` is -bytes."""
        best = max(starts, key=self.score)
        while True:
            units = [marginal.dial for marginal in sorted(self._marginals(best), key=lambda one: one.more_bytes)]
            changed = [*self._of_job(best), *(units if self._is_small else units[:_NUM_SINGLES])]
            better = max(changed, key=self.score, default=best)
            if self.score(better) <= self.score(best):
                return best
            best = better

    @property
    def _is_small(self) -> bool:
        return len(self.costs.names) <= _FEW_UNITS

    def _changes(self, dial: Dial) -> list[Dial]:
        """Return dials that differ from it in one thing."""
        return [*self._of_job(dial), *self._singles(self._marginals(dial))]

    def _of_job(self, dial: Dial) -> Iterator[Dial]:
        """Yield changes that are not of a single unit."""
        for batch in self.batches.near(dial.batch):
            yield replace(dial, batch=batch, accumulate=self.batches.accumulate(batch))
        rows = dict.fromkeys(choice.row for choice in self.options[dial.mesh])
        for row in rows:
            # The row of the root, and that of all other units.
            yield replace(dial, root=row)
            yield replace(dial, choices=tuple(choice.on(row) for choice in dial.choices))
        if any(STRATEGIES[choice.row].params.is_sharded for choice in dial.choices):
            yield from (replace(dial, prefetch=depth) for depth in _PREFETCHES if depth != dial.prefetch)

    def _marginals(self, dial: Dial) -> list[_Marginal]:
        """Return every change of one unit."""
        choices = self.options[dial.mesh] if self._is_small else self._useful(dial)
        return [
            self._marginal(dial, at=at, choice=choice)
            for at in self._edges(dial)
            for choice in choices
            if choice != dial.choices[at]
        ]

    def _marginal(self, dial: Dial, *, at: int, choice: Choice) -> _Marginal:
        changed = dial.turned([at], choice)
        return self._measured(dial, changed) if self._is_small else self._expected(dial, changed, at=at)

    def _measured(self, dial: Dial, changed: Dial) -> _Marginal:
        more = self.costs.tensor_bytes(changed) - self.costs.tensor_bytes(dial)
        return _Marginal(changed, more, 1 / self.costs.speed(changed) - 1 / self.costs.speed(dial))

    def _expected(self, dial: Dial, changed: Dial, *, at: int) -> _Marginal:
        before, after = (self.costs.uniform(one.choices[at], like=dial) for one in (dial, changed))
        found, count = self._measured(before, after), len(dial.choices)
        return _Marginal(changed, found.more_bytes / count, found.lost_seconds / count)

    def _singles(self, marginals: list[_Marginal]) -> list[Dial]:
        if self._is_small:
            # Prefetched units are a large part of a small model, so that less prefetch may pay for a change.
            alone = [replace(marginal.dial, prefetch=0) for marginal in marginals]
            return [*(marginal.dial for marginal in marginals), *alone]
        faster = sorted((one for one in marginals if one.lost_seconds < 0), key=lambda one: one.lost_seconds)
        return [marginal.dial for marginal in faster[:_NUM_SINGLES]]

    def _pairs(self, dial: Dial, *, seen: set[Dial]) -> list[Dial]:
        """Return the most promising pairs of changes that fit, in which one change pays for the other."""
        marginals = self._marginals(dial)
        room = self.limit - self.costs.tensor_bytes(dial)
        promising: list[tuple[float, Dial]] = []
        for one, other in combinations(marginals, 2):
            lost = one.lost_seconds + other.lost_seconds
            if lost < 0 and one.more_bytes + other.more_bytes <= room:
                both = _both(dial, one.dial, other.dial)
                promising += [(lost, both)] if both is not None and both not in seen else []
        promising.sort(key=lambda pair: pair[0])
        found = [both for _, both in promising[:_NUM_PAIRS]]
        seen.update(found)
        return [both for both in found if self.score(both) > -inf]

    def _edges(self, dial: Dial) -> list[int]:
        """Return the first and the last unit of each row of equal units with equal choices."""
        choices = dial.choices
        return [
            at
            for members in self.costs.classes
            for at in members
            if at in (members[0], members[-1]) or not choices[at - 1] == choices[at] == choices[at + 1]
        ]

    def _useful(self, dial: Dial) -> list[Choice]:
        """Return the choices that, given to all units, are faster than all smaller ones."""
        alike = {choice: self.costs.uniform(choice, like=dial) for choice in self.options[dial.mesh]}
        costs = {choice: (self.costs.tensor_bytes(one), -self.costs.speed(one)) for choice, one in alike.items()}
        found: list[Choice] = []
        for choice in sorted(costs, key=lambda choice: costs[choice]):
            if not found or costs[choice][1] < costs[found[-1]][1]:
                found.append(choice)
        return found


def _both(dial: Dial, one: Dial, other: Dial) -> Dial | None:
    """Combine the changes of two units; None if it is the same unit."""
    choices = []
    for before, first, second in zip(dial.choices, one.choices, other.choices, strict=True):
        if first != before and second != before:
            return None
        choices.append(first if first != before else second)
    return replace(dial, choices=tuple(choices))
