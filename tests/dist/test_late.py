"""Every way to misuse a collective's buffer fails on every run under the late collectives; right use changes nothing."""

import pytest
import torch
import torch.distributed as dist
from late import LateCollectives, LateError
from ranks import run_ranks, world_group
from torch import Tensor

from shardwise.comm.groups.collectives import BackendCollectives, Collectives, Work, own_slice
from shardwise.comm.groups.groups import Group

KINDS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
NUM_ELEMENTS = 12


def issue(collectives: Collectives, kind: str, buffer: Tensor, *, group: Group) -> Work:
    if kind == "broadcast":
        return collectives.broadcast(buffer, source=group.size - 1, group=group)
    return getattr(collectives, kind)(buffer, group=group)


def values(rank: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(NUM_ELEMENTS) * 10 + rank).to(dtype)


def late_collectives(rank: int) -> LateCollectives:
    return LateCollectives(BackendCollectives(), seed=rank)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def message_of(work: Work) -> str:
    """What `wait` complains of, on this rank; "" if of nothing."""
    try:
        work.wait()
    except LateError as error:
        return str(error)
    return ""


def right_use(rank: int, kind: str, dtype: torch.dtype) -> bool:
    group, late = world_group(), late_collectives(rank)
    expected = values(rank, dtype=dtype)
    buffer = expected.clone()
    issue(BackendCollectives(), kind, expected, group=group).wait()
    work = issue(late, kind, buffer, group=group)
    work.wait()
    work.wait()
    late.assert_all_waited()
    late.assert_same_order(group)
    assert late.issued == [(kind, NUM_ELEMENTS, group.ranks)]
    if kind == "reduce_scatter":
        expected, buffer = own_slice(expected, group=group), own_slice(buffer, group=group)
    return same_bits(expected, buffer)


def read_before_wait(rank: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The buffer between issue and wait, and what it was before."""
    group, late = world_group(), late_collectives(rank)
    buffer = values(rank, dtype=dtype)
    before = buffer.clone()
    work = issue(late, kind, buffer, group=group)
    between = buffer.clone()
    work.wait()
    return between, before


def others_after_reduce_scatter(rank: int) -> tuple[Tensor, Tensor]:
    group, late = world_group(), late_collectives(rank)
    buffer = values(rank)
    late.reduce_scatter(buffer, group=group).wait()
    own = own_slice(buffer, group=group).clone()
    own_slice(buffer, group=group).fill_(torch.nan)
    return own, buffer


def write_before_wait(rank: int, kind: str, element: int) -> str:
    buffer = values(rank)
    work = issue(late_collectives(rank), kind, buffer, group=world_group())
    buffer[element] = 1.0
    return message_of(work)


def free_before_wait(rank: int, kind: str) -> str:
    buffer = values(rank)
    work = issue(late_collectives(rank), kind, buffer, group=world_group())
    buffer.untyped_storage().resize_(0)
    return message_of(work)


def free_and_gather_again_before_wait(rank: int, kind: str) -> str:
    buffer = values(rank)
    work = issue(late_collectives(rank), kind, buffer, group=world_group())
    num_bytes = buffer.untyped_storage().nbytes()
    buffer.untyped_storage().resize_(0)
    buffer.untyped_storage().resize_(num_bytes)
    buffer.zero_()
    return message_of(work)


def reuse_before_wait(rank: int, first: str, second: str) -> str:
    group, late = world_group(), late_collectives(rank)
    large = torch.ones(2 * NUM_ELEMENTS)
    issue(late, first, large[:NUM_ELEMENTS], group=group)
    issue(late, second, large[NUM_ELEMENTS:], group=group)
    try:
        # Overlaps both of them.
        issue(late, second, large[NUM_ELEMENTS // 2 : -NUM_ELEMENTS // 2], group=group)
    except LateError as error:
        return str(error)
    return ""


def reuse_after_wait(rank: int) -> Tensor:
    group, late = world_group(), late_collectives(rank)
    buffer = torch.ones(NUM_ELEMENTS)
    for _ in range(3):
        late.all_reduce(buffer, group=group).wait()
    late.assert_all_waited()
    return buffer


def drop_without_wait(rank: int) -> str:
    group, late = world_group(), late_collectives(rank)
    late.all_gather(values(rank), group=group).wait()
    late.all_reduce(values(rank), group=group)
    late.broadcast(values(rank), source=0, group=group)
    try:
        late.assert_all_waited()
    except LateError as error:
        return str(error)
    return ""


def swap_on_last_rank(rank: int) -> str:
    """Two all-gathers of different sizes, whose order differs; on groups of their own, so that they do finish."""
    late = late_collectives(rank)
    everyone = world_group()
    groups = [Group(handle=dist.new_group(), ranks=everyone.ranks, index=everyone.index) for _ in range(2)]
    sizes = [NUM_ELEMENTS, 2 * NUM_ELEMENTS]
    order = [1, 0] if rank == everyone.size - 1 else [0, 1]
    works = [late.all_gather(torch.ones(sizes[i]), group=groups[i]) for i in order]
    for work in works:
        work.wait()
    try:
        late.assert_same_order(everyone)
    except LateError as error:
        return str(error)
    return ""


def one_more_on_rank_zero(rank: int) -> str:
    late, everyone = late_collectives(rank), world_group()
    alone = Group(handle=dist.new_group([0]), ranks=(0,), index=0)
    late.all_reduce(values(rank), group=everyone).wait()
    if rank == 0:
        late.all_reduce(values(rank), group=alone).wait()
    late.assert_same_order(everyone)  # what goes over other ranks may differ
    if rank == 0:
        late.issued.append(late.issued[0])
    try:
        late.assert_same_order(everyone)
    except LateError as error:
        return str(error)
    return ""


def strided(rank: int) -> str:
    try:
        late_collectives(rank).all_reduce(torch.ones(NUM_ELEMENTS)[::2], group=world_group())
    except LateError as error:
        return str(error)
    return ""


def version(rank: int) -> int:
    buffer = torch.ones(NUM_ELEMENTS)
    late_collectives(rank).all_reduce(buffer, group=world_group()).wait()
    return buffer._version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_right_use_gives_the_inner_result_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    assert run_ranks(right_use, num_ranks=3, args=(kind, dtype)) == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_right_use_works_on_one_rank(kind: str) -> None:
    assert run_ranks(right_use, num_ranks=1, args=(kind, torch.float32)) == [True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_input_is_poison_until_the_wait(kind: str, dtype: torch.dtype) -> None:
    for rank, (between, before) in enumerate(run_ranks(read_before_wait, num_ranks=3, args=(kind, dtype))):
        own = slice(rank * NUM_ELEMENTS // 3, (rank + 1) * NUM_ELEMENTS // 3)
        is_input = torch.zeros(NUM_ELEMENTS, dtype=torch.bool)
        if kind == "all_gather":
            is_input[own] = True
        elif kind == "broadcast" and rank == 2:
            is_input[:] = True
        garbage = int.from_bytes(b"\xa5" * 8, "little", signed=True)
        poisoned = between.isnan() if dtype.is_floating_point else between == garbage
        assert torch.equal(poisoned, ~is_input)
        assert torch.equal(between[is_input], before[is_input])


def test_slices_that_reduce_scatter_leaves_undefined_stay_poison() -> None:
    for own, others in run_ranks(others_after_reduce_scatter, num_ranks=2):
        assert own.isfinite().all()
        assert others.isnan().all()


@pytest.mark.parametrize("element", [0, NUM_ELEMENTS - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_before_the_wait_is_caught(kind: str, element: int) -> None:
    for message in run_ranks(write_before_wait, num_ranks=2, args=(kind, element)):
        assert message.startswith(f"{kind} of {NUM_ELEMENTS} elements over ranks (0, 1)")
        assert f"element {element} of the buffer was written before the wait" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_free_before_the_wait_is_caught(kind: str) -> None:
    for message in run_ranks(free_before_wait, num_ranks=2, args=(kind,)):
        assert f"{kind} of {NUM_ELEMENTS} elements" in message
        assert "freed or resized before the wait: its storage had 48 bytes and has 0" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_free_before_the_wait_is_caught_even_if_the_memory_is_back(kind: str) -> None:
    for message in run_ranks(free_and_gather_again_before_wait, num_ranks=2, args=(kind,)):
        assert f"{kind} of {NUM_ELEMENTS} elements" in message
        assert "before the wait" in message


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_second_collective_on_memory_in_use_is_caught_at_once(first: str, second: str) -> None:
    for message in run_ranks(reuse_before_wait, num_ranks=2, args=(first, second)):
        assert message.startswith(f"{second} of {NUM_ELEMENTS} elements")
        assert f"still in use by {first} of {NUM_ELEMENTS} elements" in message


def test_a_buffer_may_be_used_again_after_the_wait() -> None:
    for buffer in run_ranks(reuse_after_wait, num_ranks=2):
        assert torch.equal(buffer, torch.full((NUM_ELEMENTS,), 8.0))


def test_works_that_nobody_waited_for_are_named() -> None:
    for message in run_ranks(drop_without_wait, num_ranks=2):
        assert message.startswith("2 collectives were not waited for: all_reduce of 12")
        assert "broadcast of 12" in message
        assert "all_gather" not in message


def test_an_order_that_differs_between_ranks_is_caught_on_every_rank() -> None:
    for message in run_ranks(swap_on_last_rank, num_ranks=3):
        assert message.endswith("as number 0, rank 0 all_gather of 12 elements and rank 2 all_gather of 24 elements")


def test_a_collective_that_only_one_rank_issued_is_caught() -> None:
    for message in run_ranks(one_more_on_rank_zero, num_ranks=2):
        assert message.endswith("as number 1, rank 0 all_reduce of 12 elements and rank 1 nothing")


def test_a_strided_buffer_is_refused() -> None:
    for message in run_ranks(strided, num_ranks=2):
        assert message.endswith("the buffer is not contiguous")


def test_version_counters_are_left_alone() -> None:
    assert run_ranks(version, num_ranks=2) == [0, 0]
