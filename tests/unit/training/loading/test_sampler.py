from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardwise.base.errors import InvalidData
from shardwise.training.loading.sampler import DistributedSampler

ranks = st.integers(1, 16)
lengths = st.integers(0, 1000)
seeds = st.integers(0, 2**32)


def samplers(num_ranks: int, length: int, **arguments: object) -> list[DistributedSampler]:
    return [
        DistributedSampler(length, rank=rank, num_ranks=num_ranks, **arguments)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]


@given(num_ranks=ranks, length=lengths, seed=seeds, shuffle=st.booleans())
def test_evaluation_sees_every_sample_once_on_one_rank(num_ranks: int, length: int, seed: int, shuffle: bool) -> None:
    parts = [list(s) for s in samplers(num_ranks, length, seed=seed, shuffle=shuffle)]
    assert sorted(sample for part in parts for sample in part) == list(range(length))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(s) for s in samplers(num_ranks, length)]


@given(num_ranks=ranks, other_ranks=ranks, length=lengths, seed=seeds)
def test_the_order_does_not_depend_on_the_number_of_ranks(
    num_ranks: int, other_ranks: int, length: int, seed: int
) -> None:
    def order(count: int) -> list[int]:
        parts = [list(s) for s in samplers(count, length, seed=seed)]
        return [parts[position % count][position // count] for position in range(length)]

    assert order(num_ranks) == order(other_ranks)


stages = st.lists(st.tuples(ranks, st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=5)


@given(length=st.integers(1, 1000), seed=seeds, stages=stages)
def test_a_run_stopped_and_resumed_on_any_ranks_loses_and_repeats_nothing(
    length: int, seed: int, stages: list[tuple[int, int, int]]
) -> None:
    """Each stage: so many ranks, micro-batch, steps; then stop, save, and go on as the next stage."""
    seen: list[int] = []
    state = DistributedSampler(length, seed=seed, endless=True).state_dict()
    for num_ranks, micro_batch, num_steps in stages:
        group = samplers(num_ranks, length, seed=seed, endless=True)
        for sampler in group:
            sampler.load_state_dict(state)
        parts = [list(islice(sampler, micro_batch * num_steps)) for sampler in group]
        seen += [part[index] for index in range(micro_batch * num_steps) for part in parts]
        for sampler in group:
            sampler.advance(num_ranks * micro_batch * num_steps)
        state = group[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in group)
    one = DistributedSampler(length, seed=seed, endless=True)
    assert seen == list(islice(one, len(seen)))
    for epoch in range(len(seen) // length):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert (state["epoch"], state["position"]) == divmod(len(seen), length)


@given(num_ranks=ranks, other_ranks=ranks, length=lengths, data=st.data())
def test_evaluation_resumes_at_any_point_with_other_ranks(
    num_ranks: int, other_ranks: int, length: int, data: st.DataObject
) -> None:
    used = data.draw(st.integers(0, length // num_ranks)) * num_ranks
    before = samplers(num_ranks, length)
    seen = [sample for s in before for sample in islice(s, used // num_ranks)]
    for s in before:
        s.advance(used)
    after = samplers(other_ranks, length)
    for s in after:
        s.load_state_dict(before[0].state_dict())
    rest = [sample for s in after for sample in s]
    if used < length:
        assert sorted(seen + rest) == list(range(length))
    elif length:
        assert after[0].epoch == 1
        assert sorted(rest) == list(range(length))


@pytest.mark.parametrize("length", [48, 1500, 5000])
def test_a_long_run_that_moves_the_sampler_on_sees_every_sample_once_in_each_epoch(length: int) -> None:
    """Also past what an iterator computes at once, and as a run does that is resumed at each step."""
    parts = samplers(2, length, endless=True)
    iterators = [iter(sampler) for sampler in parts]
    seen: list[int] = []
    num_steps = 3 * max(length, 2048) // 2
    for step in range(num_steps):
        if step % 97 == 0:
            resumed = samplers(2, length, endless=True)
            for sampler, fresh in zip(parts, resumed, strict=True):
                fresh.load_state_dict(sampler.state_dict())
            expected = [next(iter(fresh)) for fresh in resumed]
        taken = [next(iterator) for iterator in iterators]
        if step % 97 == 0:
            assert taken == expected, step
        seen += taken
        for sampler in parts:
            sampler.advance(2)
    for start in range(0, len(seen) - length + 1, length):
        assert sorted(seen[start : start + length]) == list(range(length)), start // length


def test_reading_ahead_does_not_move_the_position() -> None:
    sampler = DistributedSampler(100, endless=True)
    loader = DataLoader(list(range(100)), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    batches = iter(loader)
    first = next(batches).tolist()
    next(batches)
    sampler.advance(4)
    assert sampler.state_dict()["position"] == 4
    resumed = DistributedSampler(100, endless=True)
    resumed.load_state_dict(sampler.state_dict())
    assert not set(islice(resumed, 4)) & set(first)


def test_without_shuffling_the_order_is_the_datasets_own() -> None:
    assert list(DistributedSampler(7, rank=1, num_ranks=3, shuffle=False)) == [1, 4]
    endless = DistributedSampler(3, shuffle=False, endless=True)
    assert list(islice(endless, 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_have_other_orders() -> None:
    endless = list(islice(DistributedSampler(100, endless=True), 200))
    assert endless[:100] != endless[100:]


def test_every_pass_over_a_loader_has_a_new_order_and_set_epoch_brings_one_back() -> None:
    sampler = DistributedSampler(list(range(100)))
    loader = DataLoader(list(range(100)), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    epochs = [[int(sample) for batch in loader for sample in batch] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert sampler.epoch == 2
    sampler.set_epoch(1)
    assert [int(sample) for batch in loader for sample in batch] == epochs[1]
    assert epochs == [list(DistributedSampler(100, rank=0, num_ranks=1))] + [_epoch(number) for number in (1, 2)]


def _epoch(number: int) -> list[int]:
    sampler = DistributedSampler(100)
    sampler.set_epoch(number)
    return list(sampler)


def test_an_epoch_that_is_left_early_begins_again_and_a_look_at_one_batch_moves_nothing() -> None:
    sampler = DistributedSampler(100)
    first = list(islice(sampler, 4))
    assert list(islice(sampler, 4)) == first
    assert sampler.epoch == 0


@given(num_ranks=ranks, length=st.integers(16, 200), used=st.integers(0, 3))
def test_with_drop_last_all_ranks_have_equally_many_samples_and_none_twice(
    num_ranks: int, length: int, used: int
) -> None:
    group = samplers(num_ranks, length, drop_last=True)
    used = min(used, length // num_ranks - 1)
    for sampler in group:
        sampler.advance(used * num_ranks)
    assert {len(sampler) for sampler in group} == {length // num_ranks - used}
    parts = [list(sampler) for sampler in group]
    assert {len(part) for part in parts} == {length // num_ranks - used}
    assert len({sample for part in parts for sample in part}) == num_ranks * (length // num_ranks - used)
    # The next epoch is whole again, also for a loop that says what it has used.
    for sampler in group:
        sampler.advance((length // num_ranks - used) * num_ranks)
    assert {len(list(sampler)) for sampler in group} == {length // num_ranks}
    assert {sampler.epoch for sampler in group} == {1}


def test_rank_and_number_of_ranks_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert list(DistributedSampler(4, shuffle=False)) == [0, 1, 2, 3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(DistributedSampler(4, shuffle=False)) == [1, 3]
    assert list(DistributedSampler(4, rank=0, num_ranks=1, shuffle=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize("change", [{"num_samples": 99}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_other_data_is_refused(change: dict[str, object]) -> None:
    state = DistributedSampler(100).state_dict() | change
    with pytest.raises(InvalidData, match=next(iter(change))):
        DistributedSampler(100).load_state_dict(state)


def test_nothing_cannot_be_trained_on() -> None:
    with pytest.raises(InvalidData, match="0 samples"):
        DistributedSampler(0, endless=True)
    assert list(DistributedSampler(0)) == []
    with pytest.raises(InvalidData, match="3 samples on 4 ranks"):
        DistributedSampler(3, rank=0, num_ranks=4, drop_last=True)


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 3 of 3"):
        DistributedSampler(5, rank=3, num_ranks=3)
    with pytest.raises(ValueError, match="advance by 6"):
        DistributedSampler(5).advance(6)
    with pytest.raises(ValueError, match="epochs count from 0"):
        DistributedSampler(5).set_epoch(-1)
    with pytest.raises(TypeError, match="endless"):
        len(DistributedSampler(5, endless=True))
