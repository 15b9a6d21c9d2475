"""The ranks as a grid with two axes, `replicate` × `shard`.

State is sharded along `shard` and repeated along `replicate`. Hybrid sharding is a mesh whose
replicate axis is longer than 1. It is not a strategy, and works with every strategy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shardwise.errors import InvalidPlan
from shardwise.files.keys import check_keys, documented, key


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`replicate` groups of `shard` ranks each; rank = replicate_index · shard + shard_index.

    Ranks of one shard group are consecutive. Where ranks are numbered node by node, a shard group is a node
    or a part of one, so the heaviest traffic stays inside a node.
    """

    replicate: int = key(1, "shard groups, which hold the same slices", least=1)
    shard: int = key(1, "ranks of a shard group, which hold one slice each", least=1)

    def __post_init__(self) -> None:
        check_keys(self, path="mesh", error=InvalidPlan)

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def num_parts(self, axes: Iterable[str]) -> int:
        """Return the number of parts of what is sharded over these axes, `shard` and `replicate`."""
        return prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replicate index, shard index) of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidPlan(f"rank {rank} is outside a mesh of {self} = {self.num_ranks} ranks")
        return divmod(rank, self.shard)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the slices of the same state, this rank included."""
        first = self.coordinates(rank)[0] * self.shard
        return tuple(range(first, first + self.shard))

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same slice as this rank, this rank included."""
        return tuple(range(self.coordinates(rank)[1], self.num_ranks, self.shard))

    def check_ranks(self, num_ranks: int) -> None:
        """Raise an error if the job has another number of ranks than the mesh."""
        if num_ranks != self.num_ranks:
            raise InvalidPlan(
                f"mesh {self} is {self.num_ranks} ranks, but the job has {num_ranks}: leave the mesh out of the plan "
                f"(shardwise train … --set plan.mesh=), or set mesh.replicate × mesh.shard = {num_ranks}"
            )

    def __str__(self) -> str:
        return f"{self.replicate}×{self.shard}"
