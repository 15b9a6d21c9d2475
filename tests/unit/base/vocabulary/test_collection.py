"""Garbage is left alone for the length of a block."""

import gc
import weakref

from shardwise.base.vocabulary.collection import without_collection


def test_nothing_is_collected_in_the_block() -> None:
    class Cyclic:
        pass

    with without_collection():
        one = Cyclic()
        one.itself = one  # type: ignore[attr-defined]
        held = weakref.ref(one)
        del one
        # More than enough for a collection.
        kept: list[list[int]] = [[] for _ in range(10_000)]
        assert held() is not None
    assert gc.isenabled()
    assert kept
