from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.training.loading.permutation import permute


@given(length=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_order_holds_every_sample_once(length: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(length), length=length, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(length))


def test_a_part_of_an_order_is_that_part() -> None:
    whole = permute(np.arange(10_000), length=10_000, seed=3, epoch=1)
    positions = np.array([9_999, 5, 0, 5])
    assert permute(positions, length=10_000, seed=3, epoch=1).tolist() == whole[positions].tolist()


def test_a_billion_samples_cost_nothing() -> None:
    samples = permute(np.array([0, 123_456_789, 999_999_999]), length=10**9, seed=0, epoch=0)
    assert len(set(samples.tolist())) == 3
    assert all(0 <= sample < 10**9 for sample in samples)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), length=50, seed=seed, epoch=epoch).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_all_orders_of_four_are_about_equally_likely() -> None:
    counts = Counter(tuple(permute(np.arange(4), length=4, seed=1, epoch=epoch).tolist()) for epoch in range(24 * 200))
    assert len(counts) == 24
    # 23 degrees of freedom: beyond 49.7 lies one in a thousand.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_neighbours_do_not_stay_neighbours() -> None:
    order = permute(np.arange(10_000), length=10_000, seed=0, epoch=0)
    assert (np.abs(np.diff(order)) == 1).sum() < 12  # 2 are expected
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.04  # four standard deviations


def test_the_order_is_the_same_for_ever() -> None:
    """Saved runs hold a position in it: if this fails, they would lose and repeat samples."""
    assert permute(np.arange(10), length=10, seed=0, epoch=0).tolist() == [8, 7, 6, 1, 4, 9, 2, 0, 5, 3]
    assert permute(np.arange(5), length=10**12, seed=42, epoch=7).tolist() == [
        525972173552,
        168323217467,
        721760077689,
        305574309648,
        738902125302,
    ]
