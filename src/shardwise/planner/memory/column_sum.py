"""Scratch memory of a column sum, which is not proportional to the batch."""

from dataclasses import dataclass
from functools import lru_cache

from shardwise.spec.law import Line

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
