"""The process groups of a mesh.

Gathers and reduces have groups of their own over the same ranks: a group's collectives run in the order in
which they were issued, so in one group a gather that is needed now would wait behind a reduce that is not.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from shardwise.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate together, and this process's place among them."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshGroups:
    """What one rank needs to run a plan on a mesh.

    gather        over the shard axis, for parameters
    reduce        over the shard axis, for gradients that are sharded
    replicate     over the replicate axis, for slices of gradients
    reduce_world  over all ranks, for gradients that are replicated, and for what is broadcast
    """

    mesh: Mesh
    gather: Group
    reduce: Group
    replicate: Group
    reduce_world: Group


def mesh_groups(mesh: Mesh) -> MeshGroups:
    """Make the groups. Collective: every rank of the job calls it, at the same place in its program."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh.check_ranks(num_ranks)
    everyone = range(num_ranks)
    return MeshGroups(
        mesh=mesh,
        gather=_mine(everyone, rank=rank, group_of=mesh.shard_group),
        reduce=_mine(everyone, rank=rank, group_of=mesh.shard_group),
        replicate=_mine(everyone, rank=rank, group_of=mesh.replicate_group),
        reduce_world=_mine(everyone, rank=rank, group_of=lambda _: tuple(everyone)),
    )


def _mine(everyone: Iterable[int], *, rank: int, group_of: Callable[[int], tuple[int, ...]]) -> Group:
    """Make all groups of one kind, as torch demands of every rank, and keep the one that holds this rank."""
    mine: Group | None = None
    for ranks in dict.fromkeys(map(group_of, everyone)):
        handle = dist.new_group(list(ranks))
        if rank in ranks:
            mine = Group(handle=handle, ranks=ranks, index=ranks.index(rank))
    assert mine is not None
    return mine
