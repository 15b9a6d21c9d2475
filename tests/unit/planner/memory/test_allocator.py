"""The model of the caching allocator does what the allocator's own comments say."""

import random
from itertools import pairwise

import pytest

from shardwise.planner.memory.allocator import CachingAllocator, segment_bytes

MIB = 2**20


def test_segments_grow_with_the_request() -> None:
    assert segment_bytes(512) == segment_bytes(MIB) == 2 * MIB
    assert segment_bytes(MIB + 512) == segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(11 * MIB) == 12 * MIB


def test_requests_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert allocator.allocated_bytes == 512 + 1024
    assert allocator.reserved_bytes == 2 * MIB


def test_what_is_freed_stays_reserved_and_is_used_again() -> None:
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.free(allocator.allocate(30 * MIB))
    assert allocator.reserved_bytes == 30 * MIB


def test_a_block_is_not_split_for_less_than_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    block = allocator.allocate(30 * MIB - MIB)
    assert block.size == 30 * MIB
    allocator.free(block)
    assert allocator.allocate(29 * MIB - 512).size == 29 * MIB - 512


def test_neighbours_join_when_they_are_free() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[0], blocks[2]):
        allocator.free(block)
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_of_two_free_blocks_of_one_size_the_newer_segment_is_taken() -> None:
    allocator = CachingAllocator()
    older, newer = (allocator.allocate(30 * MIB) for _ in range(2))
    allocator.free(newer)
    allocator.free(older)
    assert allocator.allocate(30 * MIB) is newer


def test_in_a_segment_the_first_of_two_free_blocks_of_one_size_is_taken() -> None:
    allocator = CachingAllocator()
    first, _, third, _ = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(third)
    allocator.free(first)
    assert allocator.allocate(5 * MIB) is first


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(30 * MIB, stream="gather")
    assert allocator.reserved_bytes == 60 * MIB


def test_a_full_device_gives_back_what_is_free() -> None:
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_do_not_fragment_where_fixed_ones_do() -> None:
    fixed, expandable = CachingAllocator(), CachingAllocator(expands=True)
    for allocator in (fixed, expandable):
        for block in [allocator.allocate(size * MIB) for size in (40, 60)]:
            allocator.free(block)
        # Neither segment is large enough; together they are.
        allocator.allocate(100 * MIB)
    assert fixed.reserved_bytes == 200 * MIB
    assert expandable.reserved_bytes == 100 * MIB


def test_an_expandable_segment_grows_by_pages_at_its_free_end() -> None:
    allocator = CachingAllocator(expands=True)
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 62 * MIB


def test_its_end_is_used_last_and_any_block_is_split() -> None:
    allocator = CachingAllocator(expands=True)
    first, _, end = (allocator.allocate(size * MIB) for size in (40, 3, 17))
    allocator.free(end)
    allocator.free(first)
    block = allocator.allocate(17 * MIB - 512)
    assert (block.address, block.size) == (first.address, 17 * MIB - 512)


def test_a_full_device_gets_free_pages_back_from_between_blocks() -> None:
    allocator = CachingAllocator(limit_bytes=120 * MIB, expands=True)
    blocks = [allocator.allocate(size * MIB) for size in (10, 70, 20)]
    allocator.free(blocks[1])
    assert allocator.reserved_bytes == 100 * MIB
    # Of the pages at 0, 20, 40, 60 and 80 MiB the middle three are free.
    allocator.allocate(80 * MIB, stream="gather")
    assert allocator.reserved_bytes == (100 - 60 + 80) * MIB
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 180 * MIB


@pytest.mark.parametrize("limit_bytes", [None, 500 * MIB])
@pytest.mark.parametrize("expands", [False, True])
def test_no_byte_is_lost_or_handed_out_twice(expands: bool, limit_bytes: int | None) -> None:
    numbers = random.Random(0)
    allocator = CachingAllocator(limit_bytes=limit_bytes, expands=expands)
    held = []
    for _ in range(3000):
        if held and numbers.random() < 0.5:
            allocator.free(held.pop(numbers.randrange(len(held))))
        else:
            held.append(allocator.allocate(numbers.choice((700, 300_000, 3 * MIB, 17 * MIB, 90 * MIB))))
        free = sum(block.size for pool in allocator._free.values() for block in pool.blocks)
        assert allocator.allocated_bytes == sum(block.size for block in held)
        gone = sum(len(pool.given_back) * pool.page for pool in allocator._free.values())
        assert allocator.allocated_bytes + free == allocator.reserved_bytes + gone
        places = sorted((block.pool.page, block.address, block.size) for block in held)
        assert all(
            page != other or address + size <= after for (page, address, size), (other, after, _) in pairwise(places)
        )
    for block in held:
        allocator.free(block)
    free_blocks = [block for pool in allocator._free.values() for block in pool.blocks]
    assert all(block.before is None and block.after is None for block in free_blocks)
