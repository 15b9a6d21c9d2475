"""What the GPU's allocator wrote down, as allocations; the recording itself is tested on a GPU (tests/gpu)."""

from typing import Any

from shardwise.base.vocabulary.allocation import FOREVER, Allocation
from shardwise.measure.profile.cuda_allocations import _allocations


def event(action: str, address: int, size: int = 512) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_a_block_lives_until_its_free_is_asked_for() -> None:
    events = [
        event("segment_alloc", 0, 2**21),
        event("alloc", 16, 100),
        event("alloc", 32, 200),
        event("free_requested", 16, 100),
        event("free_completed", 16, 100),
    ]
    assert list(_allocations(events)) == [
        Allocation(address=16, num_bytes=100, born=1, freed=3),
        Allocation(address=32, num_bytes=200, born=2, freed=FOREVER),
    ]


def test_an_address_that_is_given_out_again_is_another_block() -> None:
    events = [event("alloc", 16, 1), event("alloc", 32), event("free_requested", 16), event("alloc", 16, 3)]
    assert [(one.num_bytes, one.born, one.freed) for one in _allocations(events) if one.address == 16] == [
        (1, 0, 2),
        (3, 3, FOREVER),
    ]


def test_what_goes_before_anything_else_happens_is_a_kernels_own() -> None:
    events = [event("alloc", 16), event("free_requested", 16), event("alloc", 16), event("alloc", 32)]
    events += [event("free_requested", 16)]
    assert [one.is_scratch for one in _allocations(events)] == [True, False, False]


def test_what_was_there_before_the_recording_is_not_counted() -> None:
    assert list(_allocations([event("free_requested", 16)])) == []
