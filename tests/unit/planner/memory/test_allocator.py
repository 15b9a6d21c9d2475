"""The model of the caching allocator does what the allocator's own comments say."""

import random

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


def test_no_byte_is_lost_or_handed_out_twice() -> None:
    numbers = random.Random(0)
    allocator = CachingAllocator()
    held = []
    for _ in range(3000):
        if held and numbers.random() < 0.5:
            allocator.free(held.pop(numbers.randrange(len(held))))
        else:
            held.append(allocator.allocate(numbers.choice((700, 300_000, 3 * MIB, 17 * MIB, 90 * MIB))))
        free = sum(block.size for pool in allocator._free.values() for block in pool.blocks.values())
        assert allocator.allocated_bytes == sum(block.size for block in held)
        assert allocator.allocated_bytes + free == allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    free_blocks = [block for pool in allocator._free.values() for block in pool.blocks.values()]
    assert all(block.before is None and block.after is None for block in free_blocks)
