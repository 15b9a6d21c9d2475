"""Hill climbing gives the same dial in every process."""

from types import SimpleNamespace
from typing import Any

from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.search.climb import Climb
from shardwise.planner.search.dial import Choice, Dial


def test_of_equally_good_changes_the_first_is_taken() -> None:
    """Not the first of a set of them, whose order depends on the seed of Python's hashes."""
    mesh = Mesh(shard=2)
    options = [Choice(row, recompute) for row in STRATEGIES for recompute in ("none", "selective", "full")]
    start = Dial(root="fsdp", choices=(Choice("fsdp", "full"),), mesh=mesh, prefetch=1, batch=1, accumulate=1)
    costs: Any = SimpleNamespace(
        names=("blocks.0",), classes=[range(1)], num_replays=0, tensor_bytes=lambda dial: 0.0, speed=lambda dial: 1.0
    )
    batches: Any = SimpleNamespace(near=lambda batch: [])
    climb = Climb(
        costs=costs, options={mesh: options}, batches=batches, score=lambda dial: float(dial != start), limit=1.0
    )
    changes = [dial for dial in climb._changes(start) if dial != start]
    assert len(set(changes)) > 20
    assert climb.climbed([start]) == changes[0]
