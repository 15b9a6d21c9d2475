"""Collectives of a rank that is alone in its group."""

from typing import Any

import pytest
import torch

from shardwise.comm.collectives import BackendCollectives
from shardwise.comm.groups import Group

BACKEND = BackendCollectives()


@pytest.mark.parametrize(
    ("issue", "options"),
    [
        (BACKEND.all_gather, {}),
        (BACKEND.reduce_scatter, {}),
        (BACKEND.all_reduce, {}),
        (BACKEND.broadcast, {"source": 0}),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_rank_that_is_alone_hands_nothing_to_the_backend(issue: Any, options: dict[str, int]) -> None:
    # There is nothing at its handle that could be called.
    group = Group(handle=None, ranks=(3,), index=0)  # type: ignore[arg-type]
    buffer = torch.arange(4.0)
    issue(buffer, group=group, **options).wait()
    assert buffer.tolist() == [0, 1, 2, 3]
    assert group.log.issued == []
