"""Memory for copies: reused when nothing lies in it any more."""

import torch

from shardwise.engine.offload.pinned import PinnedPool


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    pool, source = PinnedPool(make=bytearray), torch.ones(4, 6)
    first = pool.empty_like(source)
    address, part = first.data_ptr(), first.copy_(source)[1:3]
    del first
    second = pool.empty_like(source)
    assert second.data_ptr() != address
    assert torch.equal(part, torch.ones(2, 6))
    assert pool.num_bytes == 2 * source.nbytes
    del part
    assert pool.empty_like(source).data_ptr() == address
    assert pool.num_bytes == 2 * source.nbytes


def test_memory_of_sizes_that_no_longer_occur_is_given_up() -> None:
    pool = PinnedPool(make=bytearray)
    pool.empty_like(torch.ones(100))
    kept = pool.empty_like(torch.ones(7))
    pool.empty_like(torch.ones(50))
    assert pool.num_bytes == 4 * (7 + 50)
    assert kept.shape == (7,)
