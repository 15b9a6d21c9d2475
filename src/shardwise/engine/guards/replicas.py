"""Compares replicated memory of the ranks bit by bit, every `compare_every` steps.

A bit that flips in one rank's memory, or code that writes to a parameter on one rank, would go unnoticed: gradients
are averaged, and every replica is stepped by the same amount from different values. So the bits of each buffer are
summed as integers, on its device, and the sums are exchanged; only if they differ, those of each parameter are.

    params replicated     the full buffer, on all ranks
    optim replicated      the master, on all ranks, where it is not the full buffer itself
    optim sharded         the master's slice, on the ranks of the mesh's `replicate` axis that hold the same one; where
                          these step parts of it, the slice that they have gathered

Without it the ranks train models that differ, and only the loss may show it. Since f06b42dc (the first comparisons of
ranks).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.errors import InvalidPlan
from shardwise.comm.groups.agreement import RanksDisagree, exchange
from shardwise.comm.groups.groups import MeshGroups
from shardwise.engine.core.flat import FlatParams

COMPARE_EVERY = 1000


def check_compare_every(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InvalidPlan(f"compare_every = {steps!r}: must be a number of steps, or 0 to compare nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """A replicated buffer. `sharded`: only ranks at this rank's place of the shard axis hold the same."""

    flat: FlatParams
    is_master: bool
    sharded: bool

    @property
    def buffer(self) -> Tensor:
        master = self.flat.master
        if self.is_master and self.flat.placement.optim.is_sharded_across:
            return master.staged
        return master.values if self.is_master else self.flat.full.buffer

    def parts(self) -> list[tuple[str, Tensor]]:
        """Return the parameters in the buffer, by name."""
        flat = self.flat
        if not self.is_master:
            return list(zip(flat.names, flat.full.views, strict=True))
        if flat.placement.optim.is_sharded_across:
            parts = flat.layout.within(flat.full.part(flat.placement.params))
        else:
            parts = [(part.index, part.start, part.stop) for part in flat.master.owned]
        return [(flat.names[index], self.buffer[start:stop]) for index, start, stop in parts]


class Replicas:
    """The replicated buffers of one model."""

    def __init__(self, flats: Sequence[FlatParams], *, groups: MeshGroups, every: int) -> None:
        self._groups = groups
        self._num_steps = 0
        self.every = every
        self._replicas = [
            _Replica(flat=flat, is_master=is_master, sharded=is_master and flat.placement.optim.is_sharded)
            for flat in flats
            for is_master, compared in (
                (False, not flat.placement.params.is_sharded),
                (True, not flat.master.aliased and not _is_alone(flat, groups=groups)),
            )
            if compared
        ]
        alone = groups.mesh.num_ranks == 1 or not self._replicas
        self._every = 0 if alone else every

    def resume_from(self, before: "Replicas") -> None:
        """Continue the count of the previous plan."""
        self._num_steps = before._num_steps

    def count_step(self) -> None:
        """Count a step before its update. Collective when a comparison is due, which is so on all ranks together."""
        self._num_steps += 1
        if self._every and self._num_steps % self._every == 0:
            self.compare()

    @torch.no_grad()
    def compare(self) -> None:
        """Raise, naming the ranks and the parameter, if ranks hold different bits. Collective."""
        everyone = exchange(bit_sums([replica.buffer for replica in self._replicas]))
        for number, replica in enumerate(self._replicas):
            found = self._differing([sums[number] for sums in everyone], sharded=replica.sharded)
            if found:
                self._refuse(replica, found=found)

    def _refuse(self, replica: _Replica, *, found: list[list[int]]) -> None:
        parts = replica.parts()
        # By name: ranks at other places of the shard axis hold slices of other parameters.
        named = dict(zip([name for name, _ in parts], bit_sums([part for _, part in parts]), strict=True))
        everyone = exchange(named)
        for name in dict.fromkeys(name for sums in everyone for name in sums):
            ranks = self._differing([sums.get(name) for sums in everyone], sharded=replica.sharded)
            if ranks:
                raise RanksDisagree(_describe(name, ranks))
        raise RanksDisagree(_describe(f"the padding between {', '.join(replica.flat.names)}", found))

    def _differing(self, sums: Sequence[int | None], *, sharded: bool) -> list[list[int]]:
        """Return the first ranks that should have equal sums and do not, grouped by sum, the smallest group first."""
        mesh = self._groups.mesh
        together = {mesh.replicate_group(rank) if sharded else tuple(range(len(sums))) for rank in range(len(sums))}
        for ranks in sorted(together):
            counts = Counter(sums[rank] for rank in ranks)
            if len(counts) > 1:
                alike = [[rank for rank in ranks if sums[rank] == held] for held in counts]
                return sorted(alike, key=lambda group: (len(group), group))
        return []


def _is_alone(flat: FlatParams, *, groups: MeshGroups) -> bool:
    """Return whether no other rank holds the same slice."""
    return flat.placement.optim.is_sharded and groups.replicate.size == 1


def bit_sums(buffers: Sequence[Tensor]) -> list[int]:
    """Return the sum of each buffer's bits as integers modulo 2^64; waits for the device once."""
    if not buffers:
        return []
    sums = [_bits(buffer).sum(dtype=torch.int64) for buffer in buffers]
    if len({total.device for total in sums}) > 1:
        # Some are in host memory.
        sums = [total.cpu() for total in sums]
    return [int(total) for total in torch.stack(sums).tolist()]


def _bits(buffer: Tensor) -> Tensor:
    """View a buffer as int64 if its size and alignment allow it, which those of flat buffers do; else as bytes."""
    flat = buffer.detach().reshape(-1)
    if buffer.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(torch.uint8)


def _describe(name: str, ranks: Sequence[Sequence[int]]) -> str:
    """Describe a difference. `ranks`: groups of equal ranks, the smallest first; of two equal groups none is blamed."""
    few = [] if not ranks or len(ranks[0]) == len(ranks[-1]) else ranks[0]
    each = " and ".join(f"rank {group[0]}" for group in ranks)
    who = f"rank {', '.join(map(str, few))} differs from the others" if few else f"{each} differ"
    return (
        f"{name} is no longer the same on all ranks: {who} (a bit that flipped in memory, or code that wrote to it on "
        "one rank alone); this step is not taken: resume from an earlier checkpoint"
    )
