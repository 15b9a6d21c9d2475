"""`Solver`: the best dial within a memory limit, from the replayed costs of whole steps. No torch.

1. Every dial whose units are all alike is costed: its bytes and its speed at several batches.
2. Of two such dials, a fast one that is too large and a slow one that fits, the mixture that just fits is predicted;
   the best of these mixtures are replayed, and the number of units that take the slow choice is found by bisection.
3. The best one is changed unit by unit as long as that helps (climb.py).

Costs are those of a replayed step, never a sum over units: the peak moves as choices change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from shardwise.plan.mesh import Mesh
from shardwise.planner.search.climb import Climb
from shardwise.planner.search.dial import Choice, Dial
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches, largest_fitting

# Batches that are tried before the search looks closer are so far apart.
_BATCH_RATIO, _NUM_BATCHES = 1.5, 6
# Mixtures that are replayed, and what a predicted one may lose to the best at most: predictions are too low.
_NUM_MIXTURES, _WORTH_REPLAYING = 8, 0.96
# Dials that are as good as the best; the one with the fewest different choices is taken.
_AS_FAST = 0.998


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Units of two choices, of which `fast` is too large for all of them; and the speed that is predicted for it."""

    mesh: Mesh
    fast: Choice
    slow: Choice
    batch: int
    speed: float = 0.0


@dataclass(slots=True, kw_only=True)
class Solver:
    """`options`: the choices that a unit has on each mesh. `limit`: bytes on the device, of tensors."""

    costs: DialCosts
    options: dict[Mesh, list[Choice]]
    batches: MicroBatches
    goal: str
    limit: float
    accumulate_reduced: bool = False
    _orders: dict[tuple[Mesh, Choice, Choice], list[int]] = field(default_factory=dict)

    def best(self) -> Dial | None:
        """The best dial whose tensors fit; None if none does."""
        if self.goal == "memory":
            return self._smallest()
        starts = self._starts()
        if not starts:
            # Where nothing fits whose units are all alike, something else may.
            smallest = self._smallest()
            starts = [smallest] if smallest is not None else []
        return self._simplest(self._climb(self.score).climbed(starts)) if starts else None

    def _climb(self, score: Callable[[Dial], float]) -> Climb:
        return Climb(costs=self.costs, options=self.options, batches=self.batches, score=score, limit=self.limit)

    def _smallest(self) -> Dial | None:
        """What needs the least, if that fits."""
        allowed = self.batches.allowed()
        every = [
            (mesh, choice, batch) for mesh, choices in self.options.items() for choice in choices for batch in allowed
        ]
        starts = [self.uniform(mesh, choice, batch=batch) for mesh, choice, batch in every]
        found = self._climb(lambda dial: -float(self.costs.tensor_bytes(dial))).shrunk(starts)
        return found if self.fits(found) else None

    def score(self, dial: Dial) -> float:
        """What is to be as large as can be."""
        return self.costs.speed(dial) if self.fits(dial) else -inf

    def fits(self, dial: Dial) -> bool:
        return self.costs.tensor_bytes(dial) <= self.limit

    def uniform(self, mesh: Mesh, choice: Choice, *, batch: int) -> Dial:
        return Dial(
            root=choice.row,
            choices=(choice,) * len(self.costs.names),
            mesh=mesh,
            prefetch=self.costs.base.prefetch,
            batch=batch,
            accumulate=self.batches.accumulate(batch),
            accumulate_reduced=self.accumulate_reduced and self.batches.accumulate(batch) > 1,
        )

    # 1. Dials whose units are all alike

    def _starts(self) -> list[Dial]:
        """Dials that fit: those whose units are all alike, and the most promising mixtures of two."""
        alike = list(self._alike())
        found = [dial for dial in alike if self.fits(dial)]
        best = max(map(self.costs.speed, found), default=0.0)
        mixtures = sorted(self._mixtures(self._tried(alike)), key=lambda mixture: -mixture.speed)
        for mixture in mixtures[:_NUM_MIXTURES]:
            if mixture.speed < _WORTH_REPLAYING * best:
                break
            dial = self._mixed(mixture)
            if dial is not None:
                found.append(dial)
                best = max(best, self.costs.speed(dial))
        return found

    def _alike(self) -> Iterator[Dial]:
        """Each choice for all units, at each batch that is allowed; of free ones, at the largest that fits."""
        for mesh, choices in self.options.items():
            for choice in choices:
                if self.batches.is_free:
                    batch = self._largest(mesh, choice)
                    close = [other for other in self.batches.near(batch) if other <= batch]
                    yield from (self.uniform(mesh, choice, batch=other) for other in (batch, *close))
                else:
                    yield from (self.uniform(mesh, choice, batch=batch) for batch in self.batches.allowed())

    def _largest(self, mesh: Mesh, choice: Choice) -> int:
        return largest_fitting(lambda batch: self.fits(self.uniform(mesh, choice, batch=batch)))

    def _tried(self, alike: Sequence[Dial]) -> list[int]:
        """The batches at which mixtures are looked for: up to the largest that anything fits at."""
        if not self.batches.is_free:
            return self.batches.allowed()
        most = max(dial.batch for dial in alike)
        return sorted({max(1, round(most / _BATCH_RATIO**power)) for power in range(_NUM_BATCHES)})

    # 2. Mixtures of two choices

    def _mixtures(self, batches: Sequence[int]) -> Iterator[Mixture]:
        """Pairs of a choice that is too large for all units and a slower one that fits, with the speed of a mixture."""
        for mesh, choices in self.options.items():
            for batch in batches:
                dials = {choice: self.uniform(mesh, choice, batch=batch) for choice in choices}
                fitting = [choice for choice in choices if self.fits(dials[choice])]
                for fast in (choice for choice in choices if choice not in fitting) if fitting else ():
                    for slow in fitting:
                        speed = self._mixed_speed(dials[fast], dials[slow])
                        if speed is not None:
                            yield Mixture(mesh=mesh, fast=fast, slow=slow, batch=batch, speed=speed)

    def _mixed_speed(self, fast: Dial, slow: Dial) -> float | None:
        """If bytes and seconds change evenly from one to the other; None where nothing is won.

        The peak is the highest of several points, each of which changes evenly, so it lies below: the mixture that is
        found by replaying is faster than this.
        """
        one, other = self.costs.speed(fast), self.costs.speed(slow)
        if one <= other:
            return None
        large, small = self.costs.tensor_bytes(fast), self.costs.tensor_bytes(slow)
        share = (self.limit - small) / (large - small)
        return 1 / (share / one + (1 - share) / other)

    def _mixed(self, mixture: Mixture) -> Dial | None:
        """The mixture with as few slow units as fit."""
        uniform = self.uniform(mixture.mesh, mixture.fast, batch=mixture.batch)
        order = self._order(uniform, slow=mixture.slow)
        return self._fewest(lambda count: uniform.turned(order[:count], mixture.slow), most=len(order))

    def _fewest(self, dial_of: Callable[[int], Dial], *, most: int) -> Dial | None:
        """The dial with the fewest slow units that fits, if more slow units never need more."""
        if not self.fits(dial_of(most)):
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(dial_of(middle)) else (middle, high)
        return dial_of(high)

    def _order(self, uniform: Dial, *, slow: Choice) -> list[int]:
        """Units in the order in which they should take the slow choice: of the class that frees most per second lost
        first; within a class from its first unit on, because backward starts at the last: what the last units keep is
        gone when the first ones compute again.
        """
        key = (uniform.mesh, uniform.choices[0], slow)
        if key not in self._orders:
            classes = list(self.costs.classes)
            if len(classes) > 1:
                classes.sort(key=lambda members: -self._freed(uniform, members, slow=slow))
            self._orders[key] = [at for members in classes for at in members]
        return self._orders[key]

    def _freed(self, uniform: Dial, members: range, *, slow: Choice) -> float:
        """Bytes freed at the peak per second lost, if a class takes the slow choice."""
        dial = uniform.turned(members, slow)
        freed = self.costs.tensor_bytes(uniform) - self.costs.tensor_bytes(dial)
        lost = self.costs.step_seconds(dial) - self.costs.step_seconds(uniform)
        return freed / lost if lost > 0 else inf if freed >= 0 else -inf

    def _simplest(self, best: Dial) -> Dial:
        """Of the dials that were seen and are as good as the best, the one with the fewest different choices."""
        enough = _AS_FAST * self.score(best)
        alike = [dial for dial in self.costs.timed() if self._is_own(dial) and self.score(dial) >= enough]
        return min(alike, key=lambda dial: (self._num_oddities(dial), -self.costs.speed(dial)))

    def is_better(self, dial: Dial, other: Dial | None) -> bool:
        """Whether it is to be preferred, if it fits: it is faster, or as good and simpler."""
        if other is None or not self._is_own(dial):
            return self._is_own(dial)
        one, two = self._num_oddities(dial), self._num_oddities(other)
        speed, rival = self.costs.speed(dial), self.costs.speed(other)
        if one == two:
            return speed > rival
        return speed * _AS_FAST > rival if one > two else speed >= _AS_FAST * rival

    def _num_oddities(self, dial: Dial) -> int:
        """How often a unit's choice is not that of the unit before it, and what else is unlike the usual."""
        edges = sum(one != other for one, other in pairwise(dial.choices))
        return (
            edges
            + (bool(dial.choices) and dial.root != dial.choices[-1].row)
            + (dial.prefetch != self.costs.base.prefetch)
        )

    def _is_own(self, dial: Dial) -> bool:
        """Whether it has the passes that were asked for: others were costed to tell what a pass takes."""
        return dial.accumulate == self.batches.accumulate(dial.batch)
