"""The peak of a stream of allocations and releases, and its end, as lines in the batch.

`ColumnSum` is the scratch memory of a column sum, which is not proportional to the batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shardwise.planner.memory.constants import MemoryRules
from shardwise.program.spec.step import Act, Line, StorageEvent, Stream, What

# H100 and H200 (compute capability 9.0), from the CUDA programming guide.
NUM_PROCESSORS = 132
THREADS_PER_PROCESSOR = 2048

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_ACCUMULATOR_BYTES = 4


@dataclass(frozen=True, slots=True)
class ColumnSum:
    """A matrix of `rows` (a line in the batch) summed into its columns, as for the gradient of a bias."""

    columns: int
    rows: Line

    def at(self, batch: int) -> int:
        return column_sum_bytes(self.rows.at(batch), self.columns)


@lru_cache(maxsize=65536)
def column_sum_bytes(rows: int, columns: int) -> int:
    """Return the scratch bytes in which the sums of thread blocks are combined.

    One accumulator per thread of the blocks that share an output: as many blocks as fill the device, with 16 to 256
    values per thread (setReduceConfig of aten/src/ATen/native/cuda/Reduce.cuh).
    """
    if not rows or not columns:
        return 0
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    width, most_threads = columns // vector, _MOST_THREADS // vector
    across, down = min(_power_of_two(width), most_threads), min(_power_of_two(rows), most_threads)
    block_height = min(down, most_threads // min(across, _WARP))
    block_width = min(across, most_threads // block_height)
    values = -(-rows // block_height)
    grid = -(-width // block_width)
    full_grid = NUM_PROCESSORS * (THREADS_PER_PROCESSOR // (block_width * block_height))
    if rows < min(block_height * _LEAST_VALUES, _MOST_VALUES) or values < _MOST_VALUES or grid > full_grid:
        return 0
    blocks = max(min(-(-full_grid // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return _ACCUMULATOR_BYTES * columns * blocks * block_width * vector if blocks > 1 else 0


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


Size = Line | ColumnSum
"""Bytes of an allocation, for every batch."""

Point = tuple[int, int, int, int, int]
"""(activations const, per sample, weight copies const, per sample, gradients) above the stream's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPeak:
    """A summary of a stream.

    sizes    of the events, in their order
    points   the points that are the highest for some batch
    sums     the same for points with the scratch memory of a column sum on top
    end      the point at its end
    grads    bytes of new gradients by the unit of their parameters; "": the row's own
    """

    stream: Stream
    sizes: tuple[Size, ...]
    points: tuple[Point, ...]
    end: Point
    grads: tuple[tuple[str, int], ...] = ()
    sums: tuple[tuple[ColumnSum, Point], ...] = ()


def stream_peak(stream: Stream, *, seq: int | None, rules: MemoryRules, grads_leave_at_once: bool) -> StreamPeak:
    """Follow a stream. `grads_leave_at_once`: the engine frees each gradient as soon as it is accumulated."""
    height = [0, 0, 0, 0, 0]
    points: list[Point] = []
    grads: dict[str, int] = {}
    sums: dict[ColumnSum, list[Point]] = {}
    sizes = tuple(_size(event, seq=seq) for event in stream.events)
    for event, size in zip(stream.events, sizes, strict=True):
        if isinstance(size, ColumnSum):
            if rules.sums_in_blocks:
                sums.setdefault(size, []).append(tuple(height))  # type: ignore[arg-type]
            continue
        line = _rounded(size, rules=rules)
        if event.what is What.SCRATCH:
            points.append((height[0] + line.const, height[1] + line.per_sample, *height[2:]))  # type: ignore[arg-type]
            continue
        _apply(height, event, line, grads=grads, leave_at_once=grads_leave_at_once)
        if event.act is Act.BORN:
            points.append(tuple(height))  # type: ignore[arg-type]
    end: Point = tuple(height)  # type: ignore[assignment]
    left = tuple((owner, size) for owner, size in grads.items() if size)
    on_top = tuple((column_sum, point) for column_sum, below in sums.items() for point in highest(below))
    return StreamPeak(stream=stream, sizes=sizes, points=highest(points), end=end, grads=left, sums=on_top)


def _size(event: StorageEvent, *, seq: int | None) -> Size:
    line = event.num_bytes.line(seq)
    return ColumnSum(event.columns, line) if event.columns else line


def _rounded(line: Line, *, rules: MemoryRules) -> Line:
    if line.per_sample == 0:
        return Line(-(-line.const // rules.block_bytes) * rules.block_bytes, 0)
    # Sizes that depend on the batch are not rounded up: the error is half a block per storage.
    return line


def _apply(height: list[int], event: StorageEvent, line: Line, *, grads: dict[str, int], leave_at_once: bool) -> None:
    if event.what is What.GRADIENT:
        gone = -line.const if leave_at_once else 0
        change = line.const if event.act is Act.BORN else gone
        height[4] += change
        grads[event.owner] = grads.get(event.owner, 0) + change
        return
    place = 2 if event.what is What.WEIGHT_COPY else 0
    sign = 1 if event.act is Act.BORN else -1
    height[place] += sign * line.const
    height[place + 1] += sign * line.per_sample


def highest(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that are not below another one for every batch."""
    best: list[tuple[int, int, Point]] = []
    for point in points:
        const, per_sample = point[0] + point[2] + point[4], point[1] + point[3]
        if any(c >= const and p >= per_sample for c, p, _ in best):
            continue
        best = [(c, p, other) for c, p, other in best if c > const or p > per_sample]
        best.append((const, per_sample, point))
    return tuple(point for _, _, point in best)
