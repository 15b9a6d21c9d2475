from hypothesis import given
from hypothesis import strategies as st

from shardwise.training.loading.sampler import DistributedSampler
from shardwise.training.loop.batches import Passes, Sharing


def sharings(num_ranks: int, *, micro_batch: int, accumulate: int, num_samples: int) -> list[Sharing]:
    return [
        Sharing(
            rank=rank,
            num_ranks=num_ranks,
            micro_batch=micro_batch,
            accumulate=accumulate,
            num_samples=num_samples,
        )
        for rank in range(num_ranks)
    ]


small = st.integers(1, 4)


@given(num_ranks=small, micro_batch=small, accumulate=small, num_samples=st.integers(1, 30), epochs=small)
def test_all_ranks_together_read_every_sample_once_an_epoch_in_equally_many_passes(
    num_ranks: int, micro_batch: int, accumulate: int, num_samples: int, epochs: int
) -> None:
    total = epochs * num_samples
    of_ranks = sharings(num_ranks, micro_batch=micro_batch, accumulate=accumulate, num_samples=total)
    counted: list[int] = []
    num_passes = set()
    for sharing in of_ranks:
        sampler = DistributedSampler(num_samples, rank=sharing.rank, num_ranks=num_ranks, endless=True)
        passes = list(Passes(sampler, sharing=sharing))
        num_passes.add(len(passes))
        num_seen, index = 0, 0
        while (share := sharing.share(num_seen)) is not None:
            assert len(share.counts) <= accumulate
            for count in share.counts:
                assert len(passes[index]) == (count or micro_batch)
                counted += passes[index][:count]
                index += 1
            num_seen += share.num_samples
        assert index == len(passes)
        assert num_seen == total
    assert len(num_passes) == 1
    assert sorted(counted) == sorted(list(range(num_samples)) * epochs)


@given(num_ranks=small, micro_batch=small, accumulate=small, left=st.integers(1, 80))
def test_the_weights_of_a_step_are_those_of_a_mean_over_its_samples(
    num_ranks: int, micro_batch: int, accumulate: int, left: int
) -> None:
    """A pass of n samples has n of the step's; the average over ranks divides by their number."""
    for sharing in sharings(num_ranks, micro_batch=micro_batch, accumulate=accumulate, num_samples=left):
        share = sharing.share(0)
        assert share is not None
        for count in share.counts:
            weight = share.weight(count, num_ranks=num_ranks)
            assert abs(weight / num_ranks - count / share.num_samples) < 1e-12
            if left >= sharing.step_samples:
                assert weight == 1 / accumulate


@given(num_ranks=small, micro_batch=small, accumulate=small, left=st.integers(1, 80))
def test_the_number_of_steps_is_what_it_takes(num_ranks: int, micro_batch: int, accumulate: int, left: int) -> None:
    sharing = sharings(num_ranks, micro_batch=micro_batch, accumulate=accumulate, num_samples=left)[0]
    num_seen = num_steps = 0
    while (share := sharing.share(num_seen)) is not None:
        num_seen += share.num_samples
        num_steps += 1
    assert sharing.num_steps_after(0) == num_steps
