"""The process groups of a mesh.

Gathers and reduces use separate groups over the same ranks. A group's collectives run in the order in which they were
issued, so in a shared group a gather that is needed now would wait behind a reduce that is not. Neither is the job's
own group: what a model communicates by itself (SyncBatchNorm) has another place among them on a rank that skips a unit.
What is issued outside of forward and backward shares that one, since on a GPU each group costs memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.base.torch_internals import torch_private
from shardwise.comm.groups.issued import IssueLog
from shardwise.plan.placement import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate together, the index of this rank among them, and the log of what it issued there."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    size: int = field(init=False, compare=False, repr=False)
    log: IssueLog = field(default_factory=IssueLog, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once: every collective reads it.
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshGroups:
    """The groups of one rank of a mesh.

    gather        over the shard axis, for parameters
    reduce        over the shard axis, for gradients that are sharded
    replicate     over the replicate axis, for slices of gradients
    reduce_world  over all ranks, for gradients that are replicated; `reduce` where that is all ranks
    world         the job's own, for flags and broadcasts
    """

    mesh: Mesh
    gather: Group
    reduce: Group
    replicate: Group
    reduce_world: Group
    world: Group

    def by_name(self) -> dict[str, Group]:
        """Return the groups that differ."""
        replicated = {} if self.reduce is self.reduce_world else {"reduce_world": self.reduce_world}
        return {
            "gather": self.gather,
            "reduce": self.reduce,
            "replicate": self.replicate,
            **replicated,
            "world": self.world,
        }


_MADE: dict[Mesh, MeshGroups] = {}


def mesh_groups(mesh: Mesh) -> MeshGroups:
    """Return the groups of a mesh. Collective: every rank of the job calls it, at the same point of its program.

    They are made once and shared by all models on the mesh, since a group costs connections, and on a GPU memory. Their
    collectives have the time-out of the default group.
    """
    if mesh not in _MADE or not _exist(_MADE[mesh]):
        _MADE[mesh] = _make_groups(mesh)
    return _MADE[mesh]


def _exist(groups: MeshGroups) -> bool:
    """Return whether the groups still exist: a job can be torn down and started again in one process."""
    return all(_exists(group.handle) for group in groups.by_name().values())


def _exists(handle: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(handle)
    except (ValueError, RuntimeError, KeyError):
        return False
    return True


def _make_groups(mesh: Mesh) -> MeshGroups:
    num_ranks = dist.get_world_size()
    mesh.check_ranks(num_ranks)
    shards = [mesh.shard_group(first) for first in range(0, num_ranks, mesh.shard)]
    replicas = [mesh.replicate_group(first) for first in range(mesh.shard)]
    everyone, world = tuple(range(num_ranks)), dist.group.WORLD
    assert world is not None
    reduce = _own_group(shards)
    return MeshGroups(
        mesh=mesh,
        gather=_own_group(shards),
        reduce=reduce,
        replicate=_own_group(replicas),
        reduce_world=reduce if mesh.replicate == 1 else _own_group([everyone]),
        world=Group(handle=world, ranks=everyone, index=dist.get_rank()),
    )


def _own_group(groups: Sequence[tuple[int, ...]]) -> Group:
    """Make all groups of one kind, as torch demands of every rank, and return the one with this rank."""
    rank = dist.get_rank()
    if len(groups) == dist.get_world_size() > 1:
        # Groups of one rank each, which communicate with nobody.
        return Group(handle=_alone(rank), ranks=(rank,), index=0)
    own: Group | None = None
    for ranks in groups:
        handle = dist.new_group(list(ranks), timeout=job_timeout())
        if rank in ranks:
            own = Group(handle=handle, ranks=ranks, index=ranks.index(rank))
    assert own is not None
    return own


_ALONE: list[dist.ProcessGroup] = []


def _alone(rank: int) -> dist.ProcessGroup:
    """Return a group of this rank alone, which no other rank hears of: thousands of ranks need not make thousands."""
    if not (_ALONE and _exists(_ALONE[0])):
        _ALONE[:] = [dist.new_group([rank], timeout=job_timeout(), use_local_synchronization=True)]
    return _ALONE[0]


def job_timeout() -> timedelta | None:
    """Return the default group's time-out, or None (torch's default) if the backend does not report one.

    new_group would use torch's default even if init_process_group was given another.
    """
    world = dist.group.WORLD
    assert world is not None
    # Several backends (cpu:gloo,cuda:nccl) all have the same.
    try:
        options: Any = torch_private.backend_of(world, torch_private.device_types(world)[0]).options
    except RuntimeError:
        return None
    if not isinstance(options, torch_private.BackendOptions):
        return None
    timeout: timedelta = torch_private.backend_timeout(options)
    return timeout


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives were issued in a group; 0 if its backend does not count them."""
    try:
        return int(torch_private.sequence_number(group))
    except RuntimeError:
        return 0
