"""A random permutation computed position by position, so that no list of samples is stored. No torch here.

It is a Feistel network, keyed by (seed, epoch), over the smallest square of a power of two that holds the length. A
value outside the range is passed through the network again until it lies inside ("cycle walking"), which keeps the map
a bijection. So an epoch over a billion samples costs no memory and can start at any position, and the order does not
depend on the version of a random number library: a resumed run neither loses a sample nor repeats one.
"""

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def permute(
    positions: NDArray[np.int64], *, length: int, seed: int, epoch: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the samples at `positions` of the permutation of range(length) for (seed, epoch).

    `epoch` is one number, or one per position.
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
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(*, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return keys[round, position]: one SplitMix64 stream per epoch, whose start mixes seed and epoch."""
    golden = np.uint64(_GOLDEN)
    seeds = np.full(epochs.shape, seed % 2**64, dtype=np.uint64)
    start = _mix(_mix(seeds + golden) + epochs.astype(np.uint64) * golden)
    return np.stack([_mix(start + np.uint64((index + 1) * _GOLDEN % 2**64)) for index in range(_NUM_ROUNDS)])
