"""Ranks of one job in one process, without a process group: their collectives meet in a list.

Each rank issues its collective before the first of them waits. Until then what is on its way is poisoned, as it is in
tests/dist/late.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import Work, own_slice
from shardwise.comm.groups.groups import Group, MeshGroups
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program.spec import ROOT, ModelSpec, UnitSpec


class Peers:
    """What the ranks of one job have sent."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # By the name of the collective, its group's ranks, and how many of those there were before.
        self.sent: dict[tuple[str, tuple[int, ...], int], dict[int, Tensor]] = {}

    def rank(self, rank: int) -> "PeerCollectives":
        return PeerCollectives(self, rank=rank)


class PeerCollectives:
    """One rank's collectives. `issued` names them in order."""

    def __init__(self, peers: Peers, *, rank: int) -> None:
        self.peers = peers
        self.rank = rank
        self.issued: list[str] = []
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return self._issue("all_gather", buffer, group=group, result=lambda _, sent: _tiled(sent, group=group))

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """The other slices are left poisoned: nobody may read them."""

        def result(poisoned: Tensor, sent: dict[int, Tensor]) -> Tensor:
            whole = poisoned.clone()
            own_slice(whole, group=group).copy_(own_slice(_total(sent), group=group))
            return whole

        return self._issue("reduce_scatter", buffer, group=group, result=result)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        return self._issue("all_reduce", buffer, group=group, result=lambda _, sent: _total(sent))

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        return self._issue("broadcast", buffer, group=group, result=lambda _, sent: sent[group.ranks[source]])

    def _issue(
        self, name: str, buffer: Tensor, *, group: Group, result: Callable[[Tensor, dict[int, Tensor]], Tensor]
    ) -> Work:
        self.issued.append(name)
        count = self._counts[name, group.ranks] = self._counts.get((name, group.ranks), -1) + 1
        sent = self.peers.sent.setdefault((name, group.ranks, count), {})
        sent[self.rank] = buffer.detach().clone()
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        return _Waiting(lambda: _deliver(buffer, sent, group=group, result=result))


class _Waiting:
    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver = deliver

    def wait(self) -> None:
        self.deliver()


def _deliver(
    buffer: Tensor,
    sent: dict[int, Tensor],
    *,
    group: Group,
    result: Callable[[Tensor, dict[int, Tensor]], Tensor],
) -> None:
    missing = [rank for rank in group.ranks if rank not in sent]
    assert not missing, f"rank {missing} has not come to this collective"
    with torch.no_grad():
        buffer.copy_(result(buffer, sent))


def _total(sent: dict[int, Tensor]) -> Tensor:
    return torch.stack([sent[rank] for rank in sorted(sent)]).sum(0)


def _tiled(sent: dict[int, Tensor], *, group: Group) -> Tensor:
    """Slice i of what the group's i-th rank has sent."""
    slices: list[Any] = [sent[rank].chunk(group.size)[index] for index, rank in enumerate(group.ranks)]
    return torch.cat(slices)


def groups_of(mesh: Mesh, *, rank: int) -> MeshGroups:
    """The groups of one rank, with nothing behind them."""

    def group(ranks: tuple[int, ...]) -> Group:
        return Group(handle=None, ranks=ranks, index=ranks.index(rank))  # type: ignore[arg-type]

    return MeshGroups(
        mesh=mesh,
        gather=group(mesh.shard_group(rank)),
        reduce=group(mesh.shard_group(rank)),
        replicate=group(mesh.replicate_group(rank)),
        reduce_world=group(tuple(range(mesh.num_ranks))),
        world=group(tuple(range(mesh.num_ranks))),
    )


def setting_of(mesh: Mesh, *, rank: int, peers: Peers, plan: Plan) -> CoreSetting:
    """The setting of a rank's core, for a model that is of no concern."""
    return CoreSetting(
        spec=ModelSpec(name="none", units=(UnitSpec(name=ROOT, class_name="Net"),), call_order=(ROOT,)),
        plan=plan,
        groups=groups_of(mesh, rank=rank),
        collectives=peers.rank(rank),
        device=torch.device("cpu"),
    )
