"""A tensor as slices that are cut in a regular way: a few numbers, however many ranks have written it.

A flat buffer is cut into equal slices, one per rank. So in the files of a checkpoint almost every slice of a tensor has
the size of the one before it, and lies in the file of the next rank:

    start 0, size 96, count 1, rank 6           elements   0 …  96 of the flattened tensor in the file of rank 6
    start 96, size 128, count 1000, rank 7      elements  96 … 224 in that of rank 7, 224 … 352 in that of rank 8, …
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SliceRun:
    """`count` slices of `size` elements each, one after another from element `start` on.

    The first one is in the file of `rank`, each further one in that of the rank `stride` after it.
    """

    start: int
    size: int
    rank: int
    count: int = 1
    stride: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.size * self.count

    @property
    def ranks(self) -> list[int]:
        return [self.rank + index * self.stride for index in range(self.count)]

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, rank) of each slice that has elements in common with those from `start` to `stop`."""
        first = max(0, (start - self.start) // self.size)
        last = min(self.count, -((self.start - stop) // self.size))
        for index in range(first, last):
            begin = self.start + index * self.size
            yield begin, begin + self.size, self.rank + index * self.stride

    def joined(self, after: "SliceRun") -> "SliceRun | None":
        """Return both as one, if the other continues this one."""
        stride = after.rank - self.rank if self.count == 1 else self.stride
        continues = (
            after.start == self.stop
            and after.size == self.size
            and after.rank == self.rank + self.count * stride
            and (after.count == 1 or after.stride == stride)
        )
        return replace(self, count=self.count + after.count, stride=stride) if continues else None


def merged_runs(runs: Iterable[SliceRun]) -> tuple[SliceRun, ...]:
    """Return the same slices in order, in as few runs as that gives."""
    found: list[SliceRun] = []
    for run in sorted(runs):
        joined = found[-1].joined(run) if found else None
        if joined is None:
            found.append(run)
        else:
            found[-1] = joined
    return tuple(found)


def slices_between(runs: tuple[SliceRun, ...], *, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, rank) of each slice, of runs in order, that overlaps elements `start` to `stop`."""
    first = max(0, bisect_right(runs, start, key=lambda run: run.start) - 1)
    for run in runs[first:]:
        if run.start >= stop:
            return
        yield from run.overlapping(start, stop)


def cover(runs: tuple[SliceRun, ...], *, num_elements: int) -> bool:
    """Return whether runs in order hold each of so many elements once."""
    ends = [(0, 0), *((run.start, run.stop) for run in runs), (num_elements, num_elements)]
    return all(before == after for (_, before), (after, _) in pairwise(ends))
