"""The ranks as a grid with two axes, `replicate` × `shard`.

State is sharded along `shard` and repeated along `replicate`. Hybrid sharding is a mesh whose
replicate axis is longer than 1; it is not a strategy, and works with every one of them.
"""

from dataclasses import dataclass

from shardwise.errors import InvalidPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`replicate` groups of `shard` ranks each; rank = replicate_index · shard + shard_index.

    Ranks of one shard group are consecutive, so a shard group is a node (or a part of one)
    wherever ranks are numbered node by node, and the traffic that is heaviest stays inside.
    """

    replicate: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for axis in ("replicate", "shard"):
            length = getattr(self, axis)
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise InvalidPlan(f"mesh.{axis} = {length!r}: must be a whole number of at least 1")

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replicate index, shard index) of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidPlan(f"rank {rank} is outside a mesh of {self} = {self.num_ranks} ranks")
        return divmod(rank, self.shard)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other slices of what this rank holds a slice of."""
        first = self.coordinates(rank)[0] * self.shard
        return tuple(range(first, first + self.shard))

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same slice as this rank."""
        return tuple(range(self.coordinates(rank)[1], self.num_ranks, self.shard))

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a job whose number of ranks is not the mesh's."""
        if num_ranks != self.num_ranks:
            raise InvalidPlan(
                f"mesh {self} is {self.num_ranks} ranks, but the job has {num_ranks}: "
                f"set mesh.replicate × mesh.shard = {num_ranks}, or leave the mesh out"
            )

    def __str__(self) -> str:
        return f"{self.replicate}×{self.shard}"
