"""Gradients: copied once into a buffer of the reduce dtype, summed over the ranks, handed to their owners.

Replicated gradients keep the buffer: it is the gradients. Sharded ones keep this rank's slice of it, which on a mesh
with a second axis is summed over that too, while backward goes on. In an accumulation the buffer waits, and each pass
adds to what it holds.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Collectives, Work, own_slice
from shardwise.comm.groups import MeshGroups
from shardwise.engine.flat import FlatParams
from shardwise.engine.guard import unguarded
from shardwise.engine.passes import Passes
from shardwise.engine.tape import Tape
from shardwise.engine.unit import Unit
from shardwise.placement import SHARDED
from shardwise.program import Bucket, Kind


class _Segment:
    """Flat buffers whose gradients share one buffer and one collective: all of one dtype."""

    def __init__(self, flat: FlatParams, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.flats = [flat]
        # Of all gradients, and their places in it, flat by flat; once these are summed over the shard axis, of the
        # slice that goes over `replicate`.
        self.buffer: Tensor | None = None
        self._views: list[list[Tensor]] = []
        # Whether earlier passes have left gradients in the buffer.
        self.holds = False
        self.work: Work | None = None
        self._kept: _Kept | None = None

    @property
    def num_elements(self) -> int:
        return sum(flat.layout.num_elements for flat in self.flats)

    def views(self, flat: FlatParams) -> list[Tensor]:
        """The places of a flat's gradients in the buffer, which comes into being with the first that asks."""
        if self.buffer is None:
            if self._kept is not None and self._kept.is_unused():
                self.buffer, self._views = self._kept.buffer, self._kept.views
            else:
                self.buffer = torch.empty(self.num_elements, dtype=self.dtype, device=flat.device)
                self._views = self._cut()
        return self._views[self.flats.index(flat)]

    def parts(self) -> Sequence[Tensor]:
        """The buffer, flat by flat."""
        assert self.buffer is not None
        if len(self.flats) == 1:
            return [self.buffer]
        return torch.split_with_sizes(self.buffer, [flat.layout.num_elements for flat in self.flats])

    def _cut(self) -> list[list[Tensor]]:
        return [flat.views(part) for flat, part in zip(self.flats, self.parts(), strict=True)]

    def wait(self) -> None:
        """Until what was sent is there."""
        assert self.work is not None
        self.work.wait()
        self.work = None

    def release(self) -> None:
        """The buffer has done its work here."""
        self.buffer = None
        self._views = []

    @property
    def kept(self) -> Tensor | None:
        """The buffer that stays for the next step, if any."""
        return self._kept.buffer if self._kept is not None else None

    def gradients(self) -> list[list[Tensor]]:
        """Views of the buffer that can be its parameters' gradients.

        On a CPU, where a new buffer costs a page fault every 4 KiB, it is used again when no gradient lies in it any
        more; so gradients are then views of their own, that can be counted.
        """
        assert self.buffer is not None
        if self.buffer.device.type != "cpu":
            return self._views
        if self._kept is None or self._kept.buffer is not self.buffer:
            self._kept = _Kept(buffer=self.buffer, views=self._views)
        return self._cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A buffer that has done its work, with the views of it that are needed to fill it again."""

    buffer: Tensor
    views: list[list[Tensor]]

    def is_unused(self) -> bool:
        """Whether no gradient lies in it any more: its uses are the buffer itself, our views, and this question."""
        num_uses = int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))
        return num_uses == 2 + sum(map(len, self.views))


class ReduceBucket:
    """A bucket of the program at work."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        units: list[Unit],
        reduce_dtype: torch.dtype,
        groups: MeshGroups,
        collectives: Collectives,
        tape: Tape,
        passes: Passes,
    ) -> None:
        self.bucket = bucket
        self.units = units
        self.groups = groups
        self.collectives = collectives
        self.tape = tape
        self.passes = passes
        self.sharded = units[0].placement.grads is SHARDED
        # Whether slices are summed over a second axis of the mesh too.
        self.crosses = self.sharded and groups.replicate.size > 1
        self.scale = 1 / groups.mesh.num_ranks
        self.ready: set[str] = set()
        self.segments: list[_Segment] = []
        # Where the gradients of each unit go.
        self._places: dict[str, list[tuple[FlatParams, _Segment]]] = {
            unit.name: [
                (flat, self._segment_for(flat, dtype=_reduce_dtype(flat, reduce_dtype)))
                for flat in unit.flats
                if flat.full.is_floating_point() or flat.full.is_complex()
            ]
            for unit in units
        }

    def _segment_for(self, flat: FlatParams, *, dtype: torch.dtype) -> _Segment:
        """Sharded gradients are cut into slices flat by flat; replicated ones of a dtype go together."""
        if not self.sharded:
            for segment in self.segments:
                if segment.dtype == dtype:
                    segment.flats.append(flat)
                    return segment
        self.segments.append(_Segment(flat, dtype=dtype))
        return self.segments[-1]

    @property
    def complete(self) -> bool:
        """Whether the gradients of all its units are in the buffer."""
        return len(self.ready) == len(self.units)

    @torch.no_grad()
    def take_grads(self, unit: Unit) -> None:
        """Move a unit's gradients into the buffer; a parameter without one counts as zero."""
        self.ready.add(unit.name)
        unit.closed = True
        weight = self.passes.weight(num_ranks=self.groups.mesh.num_ranks)
        if weight:
            unit.used |= unit.with_grads
        for flat, segment in self._places[unit.name]:
            _copy_in(flat, segment.views(flat), add=segment.holds, weight=weight)

    @torch.no_grad()
    def keep(self) -> None:
        """Leave the gradients in the buffer for a later pass."""
        self._take_missing()
        for segment in self.segments:
            segment.holds = True
        self.ready.clear()

    def _take_missing(self) -> None:
        for unit in self.units:
            if unit.name not in self.ready:
                self.take_grads(unit)

    @property
    def holds(self) -> bool:
        return any(segment.holds for segment in self.segments)

    @torch.no_grad()
    def forget(self, names: AbstractSet[str]) -> None:
        """Clear what is held for the parameters of these names; with all of them, the buffer goes."""
        for segment in self.segments:
            if not segment.holds:
                continue
            for flat in segment.flats:
                for view, name in zip(segment.views(flat), flat.names, strict=True):
                    if name in names:
                        view.zero_()
            if all(name in names for flat in segment.flats for name in flat.names):
                segment.holds = False
                segment.release()

    @torch.no_grad()
    def start(self) -> None:
        """Sum over the ranks."""
        self._take_missing()
        for segment in self.segments:
            buffer = segment.buffer
            assert buffer is not None
            if self.sharded:
                segment.work = self.collectives.reduce_scatter(buffer, group=self.groups.reduce)
            else:
                segment.work = self.collectives.all_reduce(buffer, group=self.groups.reduce_world)
        self.tape.record(Kind.REDUCE, self.bucket.name, self._num_bytes)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, average them, and give each owner its gradient, unless its slice is to cross first."""
        for segment in self.segments:
            segment.wait()
            segment.holds = False
            if not self.sharded:
                self._deliver_whole(segment)
            elif not self.crosses:
                self._deliver_slice(segment)
        self.ready.clear()
        self.tape.record(Kind.WAIT_REDUCE, self.bucket.name, self._num_bytes)

    @torch.no_grad()
    def start_slice(self) -> None:
        """Sum this rank's slice over `replicate`: a copy of it, so that the buffer can go meanwhile."""
        for segment in self.segments:
            assert segment.buffer is not None
            mine = own_slice(segment.buffer, group=self.groups.reduce).clone()
            segment.release()
            segment.buffer = mine
            segment.work = self.collectives.all_reduce(mine, group=self.groups.replicate)
        self.tape.record(Kind.REDUCE_SLICE, self.bucket.name, self._slice_bytes)

    @torch.no_grad()
    def finish_slice(self) -> None:
        """Wait for the sum of the slice, average it, and give it to its owner."""
        for segment in self.segments:
            segment.wait()
            (flat,) = segment.flats
            assert segment.buffer is not None
            flat.add_grads(segment.buffer.to(flat.master_dtype).mul_(self.scale))
            segment.release()
        self.tape.record(Kind.WAIT_SLICE, self.bucket.name, self._slice_bytes)

    def _num_bytes(self) -> int:
        return sum(segment.num_elements * segment.dtype.itemsize for segment in self.segments)

    def _slice_bytes(self) -> int:
        return self._num_bytes() // self.groups.reduce.size

    def drop(self) -> None:
        """Forget what is under way, once nobody writes into it any more (a backward that raised)."""
        for segment in self.segments:
            if segment.work is not None:
                segment.wait()
            if not segment.holds:
                segment.release()
        self.ready.clear()

    def _deliver_slice(self, segment: _Segment) -> None:
        (flat,) = segment.flats
        assert segment.buffer is not None
        mine = own_slice(segment.buffer, group=self.groups.reduce)
        # A copy in any case, so that the buffer can go.
        same = flat.master_dtype == segment.dtype
        flat.add_grads(mine * self.scale if same else mine.to(flat.master_dtype).mul_(self.scale))
        segment.release()

    def _deliver_whole(self, segment: _Segment) -> None:
        assert segment.buffer is not None
        if self.scale != 1:
            segment.buffer.mul_(self.scale)
        for flat, part, views in zip(segment.flats, segment.parts(), segment.gradients(), strict=True):
            if flat.master_dtype == segment.dtype:
                flat.add_grads(part, views=views)
            else:
                flat.add_grads(part.to(flat.master_dtype))
        segment.release()


def _reduce_dtype(flat: FlatParams, planned: torch.dtype) -> torch.dtype:
    """The plan's, but never narrower than parameters that are float64."""
    return torch.promote_types(planned, flat.master_dtype) if flat.master_dtype.itemsize > 4 else planned


def _copy_in(flat: FlatParams, places: list[Tensor], *, add: bool, weight: float) -> None:
    """Gradients × weight into their places, or on top of what is there. With weight 0 they do not even count as NaN."""
    views, grads = [], []
    with unguarded():
        for parameter, view in zip(flat.params, places, strict=True):
            grad = parameter.grad
            if grad is not None and weight:
                views.append(view)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
            elif not add:
                view.zero_()
            parameter.grad = None
    if not views:
        return
    if add:
        # In the buffer's dtype also where the gradients are narrower.
        torch._foreach_add_(views, grads, alpha=weight)
        return
    torch._foreach_copy_(views, grads)
    if weight != 1.0:
        torch._foreach_mul_(views, weight)
