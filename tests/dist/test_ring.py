"""The ring gives what the backend gives: to the bit where addition cannot differ, and the same bits on every rank."""

import os

import pytest
import torch
import torch.distributed as dist
from late import LateCollectives
from ranks import run_ranks, world_group
from torch import Tensor
from whole import whole

from shardwise.comm.groups.collectives import BackendCollectives, Collectives, Work, own_slice
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.ring import RingCollectives

KINDS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
]
SIZES = [0, 1, 2, 3, 5, 7, 64, 1000, 4097]

Results = dict[tuple[str, int], tuple[Tensor, Tensor]]


def issue(collectives: Collectives, kind: str, buffer: Tensor, *, group: Group) -> Work:
    if kind == "broadcast":
        return collectives.broadcast(buffer, source=group.size - 1, group=group)
    return getattr(collectives, kind)(buffer, group=group)


def values(num_elements: int, *, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1000 * rank + num_elements)
    return (torch.randn(num_elements) * 10).to(dtype)


def num_elements(kind: str, size: int, *, num_ranks: int) -> int:
    """Gathers and scatters are of equal slices; the others take any size."""
    return size * num_ranks if kind in ("all_gather", "reduce_scatter") else size


def result(kind: str, buffer: Tensor, *, group: Group) -> Tensor:
    return own_slice(buffer, group=group) if kind == "reduce_scatter" else buffer


def ring_and_backend(rank: int, dtype: torch.dtype, ranks: tuple[int, ...]) -> Results:
    """Every kind at every size, over `ranks`: what the ring gives, and what the backend gives."""
    handle = dist.new_group(list(ranks))
    if rank not in ranks:
        return {}
    group = Group(handle=handle, ranks=ranks, index=ranks.index(rank))
    ours, theirs = RingCollectives(), BackendCollectives()
    results = {}
    for kind in KINDS:
        for size in SIZES:
            total = num_elements(kind, size, num_ranks=group.size)
            buffers = [values(total, rank=rank, dtype=dtype) for _ in range(2)]
            for collectives, buffer in zip((ours, theirs), buffers, strict=True):
                if total or collectives is ours:
                    issue(collectives, kind, buffer, group=group).wait()
            results[kind, size] = tuple(result(kind, buffer, group=group) for buffer in buffers)
    return results


def many_at_once(rank: int, late: bool) -> bool:
    """Forty works under way on two groups at once, waited for from the last to the first."""
    everyone = world_group()
    groups = [Group(handle=dist.new_group(), ranks=everyone.ranks, index=everyone.index) for _ in range(2)]
    collectives: Collectives = RingCollectives()
    if late:
        collectives = LateCollectives(collectives, seed=rank)
    issued = []
    for number in range(40):
        kind, group = KINDS[number % 4], groups[number // 4 % 2]
        buffer = values((number + 1) * group.size, rank=rank, dtype=torch.int64)
        issued.append((kind, group, buffer, buffer.clone()))
    works = [issue(collectives, kind, buffer, group=group) for kind, group, buffer, _ in issued]
    for work in reversed(works):
        work.wait()
    if isinstance(collectives, LateCollectives):
        collectives.assert_all_waited()
        collectives.assert_same_order(everyone)
    for kind, group, _, expected in issued:
        issue(BackendCollectives(), kind, expected, group=group).wait()
    return all(
        torch.equal(result(kind, buffer, group=group), result(kind, expected, group=group))
        for kind, group, buffer, expected in issued
    )


def two_models_in_one_group(rank: int) -> bool:
    """Works of two values under way in one group, of sizes that differ."""
    group, models = world_group(), (RingCollectives(), RingCollectives())
    buffers = [values(4 + 5000 * (number % 2), rank=rank, dtype=torch.int64) for number in range(40)]
    expected = [buffer.clone() for buffer in buffers]
    works = [models[number % 2].all_reduce(buffer, group=group) for number, buffer in enumerate(buffers)]
    for work in works:
        work.wait()
    for buffer in expected:
        BackendCollectives().all_reduce(buffer, group=group).wait()
    return all(torch.equal(one, other) for one, other in zip(buffers, expected, strict=True))


def fail_on_the_thread(rank: int) -> list[str]:
    """There is no addition of 8-bit floats."""
    group = Group(handle=dist.new_group(), ranks=world_group().ranks, index=rank)
    other = world_group()
    collectives = RingCollectives()
    first = collectives.all_reduce(torch.ones(4).to(torch.float8_e5m2), group=group)
    second = collectives.all_reduce(torch.ones(4), group=group)
    unharmed = collectives.all_reduce(torch.ones(4), group=other)
    messages = []
    for work in (first, first, second, unharmed):
        try:
            work.wait()
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return messages


def complaint(rank: int, kind: str, buffer: Tensor) -> str:
    group, collectives = world_group(), RingCollectives()
    try:
        issue(collectives, kind, buffer, group=group)
    except ValueError as error:
        sum_ = torch.ones(1)
        collectives.all_reduce(sum_, group=group).wait()
        assert sum_.item() == group.size, "the group is of no use after a mistake of the caller"
        return str(error)
    return ""


def process_after_use(rank: int) -> int:
    RingCollectives().all_reduce(torch.ones(4), group=world_group()).wait()
    return os.getpid()


def version_of_a_leaf(rank: int) -> tuple[int, float]:
    leaf = torch.ones(4, requires_grad=True)
    RingCollectives().all_reduce(leaf, group=world_group()).wait()
    return leaf._version, leaf.sum().item()


def two_dimensional(rank: int) -> Tensor:
    buffer = torch.ones(3, 5)
    RingCollectives().all_reduce(buffer, group=world_group()).wait()
    return buffer


def check_close(ours: Tensor, theirs: Tensor, *, num_ranks: int) -> None:
    """The order of the sum differs: n-1 roundings of a number no larger than the sum of the largest terms."""
    bound = (num_ranks - 1) * torch.finfo(ours.dtype).eps * 50 * num_ranks
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


RANKS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3)]
# Every dtype over 2 and over 3 ranks, and float32 over all.
CASES = [(ranks, dtype) for ranks in RANKS for dtype in DTYPES]
USUAL = [case for case in CASES if case[0] == (0, 1, 2) or case[1] is torch.float32]
OTHERS = [case for case in CASES if case not in USUAL]


@pytest.mark.parametrize(("ranks", "dtype"), [*USUAL, *whole(*OTHERS)], ids=str)
def test_the_ring_equals_the_backend_for_every_size(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    every_rank = run_ranks(ring_and_backend, num_ranks=max(ranks) + 1, args=(dtype, ranks))
    results = [every_rank[rank] for rank in ranks]
    for kind in KINDS:
        for size in SIZES:
            first, _ = results[0][kind, size]
            for ours, theirs in (by_rank[kind, size] for by_rank in results):
                if kind == "reduce_scatter":
                    assert len(ours) == size
                else:
                    assert torch.equal(ours, first), f"{kind} of {size} differs between ranks"
                if dtype.is_floating_point and len(ranks) > 2:
                    check_close(ours, theirs, num_ranks=len(ranks))
                else:
                    assert torch.equal(ours, theirs), f"{kind} of {size} differs from the backend"


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_many_works_on_two_groups_may_be_under_way(num_ranks: int, late: bool) -> None:
    assert run_ranks(many_at_once, num_ranks=num_ranks, args=(late,)) == [True] * num_ranks


def test_models_that_share_a_group_take_turns_in_it() -> None:
    assert run_ranks(two_models_in_one_group, num_ranks=2) == [True] * 2


def test_wait_raises_what_was_raised_on_the_thread_and_the_group_is_closed() -> None:
    for first, again, second, unharmed in run_ranks(fail_on_the_thread, num_ranks=2):
        assert "not implemented for 'Float8_e5m2'" in first
        assert again == first
        assert second == "RuntimeError: an earlier ring collective of this group failed"
        assert unharmed == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_strided_buffer_is_refused_at_issue(kind: str) -> None:
    for message in run_ranks(complaint, num_ranks=2, args=(kind, torch.ones(4, 4).t())):
        assert message == "a buffer of shape (4, 4) and strides (1, 4) is not contiguous"


@pytest.mark.parametrize("num_elements", [1, 2, 4])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_buffer_without_equal_slices_is_refused_at_issue(kind: str, num_elements: int) -> None:
    for message in run_ranks(complaint, num_ranks=3, args=(kind, torch.ones(num_elements))):
        assert message == f"a buffer of {num_elements} elements has no 3 equal slices"


def test_threads_end_with_the_collectives_that_started_them() -> None:
    # A worker in which a thread is left over would not be used again.
    assert run_ranks(process_after_use, num_ranks=2) == run_ranks(process_after_use, num_ranks=2)


def test_leaves_of_autograd_are_reduced_and_version_counters_left_alone() -> None:
    assert run_ranks(version_of_a_leaf, num_ranks=2) == [(0, 8.0), (0, 8.0)]


def test_a_buffer_may_have_several_dimensions() -> None:
    for buffer in run_ranks(two_dimensional, num_ranks=2):
        assert torch.equal(buffer, torch.full((3, 5), 2.0))
