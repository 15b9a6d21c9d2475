"""A random order of any length that is never written down: position → sample, by arithmetic. No torch here.

A Feistel network over the smallest square of a power of two that holds the length, keyed by (seed, epoch);
a value that falls outside is sent through again until it falls inside ("cycle walking"), which keeps
it a bijection. So an epoch over a billion samples costs no memory and starts anywhere at once, and the
order cannot change with the version of a random number library: a run that is resumed years later, on
another machine, still neither loses a sample nor repeats one.
"""

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def permute(positions: NDArray[np.int64], *, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples at these positions of the order of (seed, epoch) over range(length)."""
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed=seed, epoch=epoch)
    values = _feistel(positions.astype(np.uint64), half_bits=half_bits, keys=keys)
    outside = values >= length
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits=half_bits, keys=keys)
        outside = values >= length
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], *, half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(*, seed: int, epoch: int) -> list[int]:
    """One key a round, from a SplitMix64 stream that starts at (seed, epoch)."""
    start = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))[0]
    start = (int(start) + epoch * _GOLDEN) & _MASK
    stream = [(start + (index + 1) * _GOLDEN) & _MASK for index in range(_NUM_ROUNDS)]
    return [int(key) for key in _mix(_mix(np.array(stream, dtype=np.uint64)))]
