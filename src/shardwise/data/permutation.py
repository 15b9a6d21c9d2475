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


def permute(
    positions: NDArray[np.int64], *, length: int, seed: int, epoch: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """The samples at these positions of the order of (seed, epoch) over range(length).

    `epoch` is one for all positions, or one for each.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed=seed, epochs=np.broadcast_to(np.asarray(epoch), positions.shape))
    values = _feistel(positions.astype(np.uint64), half_bits=half_bits, keys=keys)
    outside = values >= length
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits=half_bits, keys=keys[:, outside])
        outside = values >= length
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], *, half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(*, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[round, position]: a SplitMix64 stream for each epoch, from a start that mixes seed and epoch."""
    golden = np.uint64(_GOLDEN)
    seeds = np.full(epochs.shape, seed % 2**64, dtype=np.uint64)
    start = _mix(_mix(seeds + golden) + epochs.astype(np.uint64) * golden)
    return np.stack([_mix(start + np.uint64((index + 1) * _GOLDEN % 2**64)) for index in range(_NUM_ROUNDS)])
