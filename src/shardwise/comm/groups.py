"""The process groups of a mesh.

Gathers and reduces have groups of their own over the same ranks: a group's collectives run in the order in
which they were issued, so in one group a gather that is needed now would wait behind a reduce that is not.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from shardwise.comm.issued import IssueLog
from shardwise.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate together, this process's place among them, and what it has issued there."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    size: int = field(init=False, compare=False, repr=False)
    log: IssueLog = field(default_factory=IssueLog, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Asked for in each collective.
        object.__setattr__(self, "size", len(self.ranks))


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

    def by_name(self) -> dict[str, Group]:
        return {
            "gather": self.gather,
            "reduce": self.reduce,
            "replicate": self.replicate,
            "world": self.reduce_world,
        }


_MADE: dict[Mesh, MeshGroups] = {}


def mesh_groups(mesh: Mesh) -> MeshGroups:
    """The groups of a mesh. Collective: every rank of the job calls it, at the same place in its program.

    They are made once: a second model on the same mesh uses the same, since a group costs connections, and on a GPU
    hundreds of megabytes. Their collectives have the time-out that the default group was given.
    """
    if mesh not in _MADE or not _still_there(_MADE[mesh]):
        _MADE[mesh] = _make_groups(mesh)
    return _MADE[mesh]


def _still_there(groups: MeshGroups) -> bool:
    """Whether nobody has destroyed them since (the job was torn down and started again)."""
    try:
        for group in groups.by_name().values():
            dist.get_process_group_ranks(group.handle)
    except (ValueError, RuntimeError, KeyError):
        return False
    return True


def _make_groups(mesh: Mesh) -> MeshGroups:
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
        handle = dist.new_group(list(ranks), timeout=job_timeout())
        if rank in ranks:
            mine = Group(handle=handle, ranks=ranks, index=ranks.index(rank))
    assert mine is not None
    return mine


def job_timeout() -> timedelta | None:
    """The default group's own time-out; None, which is torch's default, for a backend that does not tell.

    new_group would take torch's default also where init_process_group was given another.
    """
    world = dist.group.WORLD
    assert world is not None
    # With several backends (cpu:gloo,cuda:nccl) all of them were given the same.
    try:
        options = world._get_backend(world._device_types[0]).options
    except RuntimeError:
        return None
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
