"""`Solver`: finds the best dial within a memory limit, from the costs of replayed steps. No torch.

1. Cost every uniform dial (one choice for all units): its bytes and its speed at several batches.
2. Of two uniform dials, a fast one that is too large and a slow one that fits, predict the mixture that just fits;
   replay the best of these mixtures, and find the number of units with the slow choice by bisection.
3. Change the best one unit by unit as long as that helps (climb.py).

Costs are those of a replayed step, never a sum over units: the peak moves as choices change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from shardwise.plan.placement import Mesh
from shardwise.planner.search.climb import Climb
from shardwise.planner.search.dial import STATES, Choice, Dial
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches, largest_fitting

# Ratio between the batches of mixtures, and their number.
_BATCH_RATIO, _NUM_BATCHES = 1.5, 6
# Mixtures that are replayed, and their least predicted speed relative to the best: predictions are too low.
_NUM_MIXTURES, _WORTH_REPLAYING = 8, 0.96
# Dials of at least this relative speed count as equally fast; the one with the fewest different choices wins.
_AS_FAST = 0.998


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Units with two choices, where `fast` is too large for all units; and the predicted speed."""

    mesh: Mesh
    fast: Choice
    slow: Choice
    batch: int
    speed: float = 0.0


@dataclass(slots=True, kw_only=True)
class Solver:
    """`options`: the choices of a unit on each mesh. `limit`: bytes of tensors on the device.

    `climbs`: whether the best dial is changed unit by unit as long as that helps.
    """

    costs: DialCosts
    options: dict[Mesh, list[Choice]]
    batches: MicroBatches
    goal: str
    limit: float
    accumulate_reduced: bool = False
    climbs: bool = True
    _orders: dict[tuple[Mesh, Choice, Choice], list[int]] = field(default_factory=dict)

    def best(self) -> Dial | None:
        """Return the best dial whose tensors fit, or None."""
        if self.goal == "memory":
            return self._smallest()
        starts = self._starts()
        if not starts:
            # If no uniform dial fits, a mixture may.
            smallest = self._smallest()
            starts = [smallest] if smallest is not None else []
        if not starts:
            return None
        best = self._climb(self.score).climbed(starts) if self.climbs else max(starts, key=self.score)
        return self._simplest(best)

    def _climb(self, score: Callable[[Dial], float]) -> Climb:
        return Climb(costs=self.costs, options=self.options, batches=self.batches, score=score, limit=self.limit)

    def _smallest(self) -> Dial | None:
        """Return the smallest dial, if it fits."""
        found = self._climb(lambda dial: -float(self.costs.tensor_bytes(dial))).shrunk(self.uniform_dials())
        return found if self.fits(found) else None

    def score(self, dial: Dial) -> float:
        return self.costs.speed(dial) if self.fits(dial) else -inf

    def fits(self, dial: Dial) -> bool:
        return self._fits_device(dial) and self.costs.fits_host(dial)

    def _fits_device(self, dial: Dial) -> bool:
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

    def uniform_dials(self) -> list[Dial]:
        """Return each choice for all units, on each mesh, at each allowed batch."""
        return [
            self.uniform(mesh, choice, batch=batch)
            for mesh, choices in self.options.items()
            for choice in choices
            for batch in self.batches.allowed()
        ]

    # 1. Uniform dials

    def _starts(self) -> list[Dial]:
        """Return dials that fit: uniform ones, and the most promising mixtures of two."""
        uniform = self._largest_dials() if self.batches.is_free else self.uniform_dials()
        found = [dial for dial in uniform if self.fits(dial)]
        best = max(map(self.costs.speed, found), default=0.0)
        mixtures = sorted(self._mixtures(self._mixture_batches(uniform)), key=lambda mixture: -mixture.speed)
        for mixture in mixtures[:_NUM_MIXTURES]:
            if mixture.speed < _WORTH_REPLAYING * best:
                break
            dial = self._mixed(mixture)
            if dial is not None:
                found.append(dial)
                best = max(best, self.costs.speed(dial))
        return found

    def _largest_dials(self) -> list[Dial]:
        """Return uniform dials at the largest batch that fits, and at slightly smaller ones."""
        found = []
        for dial in self.uniform_dials():
            batch = self._largest_batch(dial)
            close = [other for other in self.batches.near(batch) if other <= batch]
            found += [replace(dial, batch=other) for other in (batch, *close)]
        return found

    def _largest_batch(self, dial: Dial) -> int:
        return largest_fitting(lambda batch: self.fits(replace(dial, batch=batch)))

    def _mixture_batches(self, uniform: Sequence[Dial]) -> list[int]:
        """Return the batches of mixtures, up to the largest that any uniform dial fits at."""
        if not self.batches.is_free:
            return self.batches.allowed()
        most = max(dial.batch for dial in uniform)
        return sorted({max(1, round(most / _BATCH_RATIO**power)) for power in range(_NUM_BATCHES)})

    # 2. Mixtures of two choices

    def _mixtures(self, batches: Sequence[int]) -> Iterator[Mixture]:
        """Yield pairs of a choice that is too large for all units and a slower one that fits, with their speed."""
        for mesh, choices in self.options.items():
            for batch in batches:
                dials = {choice: self.uniform(mesh, choice, batch=batch) for choice in choices}
                fitting = [choice for choice in choices if self._fits_device(dials[choice])]
                for fast in (choice for choice in choices if choice not in fitting) if fitting else ():
                    for slow in fitting:
                        speed = self._mixed_speed(dials[fast], dials[slow])
                        if speed is not None:
                            yield Mixture(mesh=mesh, fast=fast, slow=slow, batch=batch, speed=speed)

    def _mixed_speed(self, fast: Dial, slow: Dial) -> float | None:
        """Predict the speed of a mixture, if bytes and seconds change linearly; None if `fast` is not faster.

        The real peak is a maximum of linear functions and so lies below the line: the replayed mixture is faster.
        """
        one, other = self.costs.speed(fast), self.costs.speed(slow)
        if one <= other:
            return None
        large, small = self.costs.tensor_bytes(fast), self.costs.tensor_bytes(slow)
        share = (self.limit - small) / (large - small)
        return 1 / (share / one + (1 - share) / other)

    def _mixed(self, mixture: Mixture) -> Dial | None:
        """Return the mixture with the fewest slow units that fits."""
        uniform = self.uniform(mixture.mesh, mixture.fast, batch=mixture.batch)
        order = self._order(uniform, slow=mixture.slow)
        found = self._fewest(lambda count: uniform.turned(order[:count], mixture.slow), most=len(order))
        return found if found is not None and self.fits(found) else None

    def _fewest(self, dial_of: Callable[[int], Dial], *, most: int) -> Dial | None:
        """Return the dial with the fewest slow units that fits, if more slow units never need more memory."""
        if not self._fits_device(dial_of(most)):
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits_device(dial_of(middle)) else (middle, high)
        return dial_of(high)

    def _order(self, uniform: Dial, *, slow: Choice) -> list[int]:
        """Return the order in which units should take the slow choice: first the class that frees most per second lost.

        Within a class from its first unit on: backward starts at the last, so what the last units keep is already freed
        when the first ones recompute. States in host memory from the last one on, which is needed last after an update.
        """
        key = (uniform.mesh, uniform.choices[0], slow)
        if key not in self._orders:
            classes = list(self.costs.classes)
            if len(classes) > 1:
                classes.sort(key=lambda members: -self._freed(uniform, members, slow=slow))
            step = -1 if STATES in slow.host else 1
            self._orders[key] = [at for members in classes for at in members[::step]]
        return self._orders[key]

    def _freed(self, uniform: Dial, members: range, *, slow: Choice) -> float:
        """Return the bytes freed at the peak per second lost if a class takes the slow choice."""
        dial = uniform.turned(members, slow)
        freed = self.costs.tensor_bytes(uniform) - self.costs.tensor_bytes(dial)
        lost = self.costs.step_seconds(dial) - self.costs.step_seconds(uniform)
        return freed / lost if lost > 0 else inf if freed >= 0 else -inf

    def _simplest(self, best: Dial) -> Dial:
        """Return the dial with the fewest different choices among those that are as fast as the best."""
        enough = _AS_FAST * self.score(best)
        as_fast = [dial for dial in self.costs.timed() if self._is_requested(dial) and self.score(dial) >= enough]
        return min(as_fast, key=lambda dial: (self._num_exceptions(dial), -self.costs.speed(dial)))

    def is_better(self, dial: Dial, other: Dial | None) -> bool:
        """Return whether a dial is preferable, if it fits: it is faster, or as fast and simpler."""
        if other is None or not self._is_requested(dial):
            return self._is_requested(dial)
        one, two = self._num_exceptions(dial), self._num_exceptions(other)
        speed, rival = self.costs.speed(dial), self.costs.speed(other)
        if one == two:
            return speed > rival
        return speed * _AS_FAST > rival if one > two else speed >= _AS_FAST * rival

    def _num_exceptions(self, dial: Dial) -> int:
        """Return how many choices differ from the previous unit's, plus an unusual root and an unusual prefetch."""
        edges = sum(one != other for one, other in pairwise(dial.choices))
        return (
            edges
            + (bool(dial.choices) and dial.root != dial.choices[-1].row)
            + (dial.prefetch != self.costs.base.prefetch)
        )

    def _is_requested(self, dial: Dial) -> bool:
        """Return whether it has the requested passes; other dials were only costed to time a pass."""
        return dial.accumulate == self.batches.accumulate(dial.batch)
