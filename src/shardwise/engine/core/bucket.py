"""Gradients: copied once into a buffer of the reduce dtype, summed over the ranks, handed to their owners.

Replicated gradients keep the buffer: it is the gradients. Sharded ones keep this rank's slice of it, which on a mesh
with a second axis is summed over that too, while backward continues. In an accumulation the buffer waits, and each pass
adds to what it holds.
"""

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from shardwise.comm.collectives import DONE
from shardwise.comm.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.precision import torch_dtype
from shardwise.engine.core.segment import Segment
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.unit import Unit
from shardwise.plan.placement import SHARDED
from shardwise.program import Bucket, Kind


class ReduceBucket:
    """A bucket of the program at work."""

    def __init__(self, bucket: Bucket, *, units: list[Unit], setting: CoreSetting) -> None:
        self.bucket, self.name = bucket, bucket.name
        self._reduces = CollectiveName(f"{Kind.REDUCE.value} {bucket.name}")
        self._reduces_slice = CollectiveName(f"{Kind.REDUCE_SLICE.value} {bucket.name}")
        self.units = units
        self._setting = setting
        self.sharded = units[0].placement.grads is SHARDED
        # Whether slices are summed over a second axis of the mesh too.
        self.crosses = self.sharded and self._setting.groups.replicate.size > 1
        self.scale = 1 / self._setting.groups.mesh.num_ranks
        self.segments: list[Segment] = []
        # Where the gradients of each unit go.
        self._places: dict[str, list[tuple[FlatParams, Segment]]] = {
            unit.name: [
                (flat, segment)
                for flat in unit.trained_flats
                if (segment := self._segment_for(flat, dtype=torch_dtype(flat.spec.reduce_dtype))) is not None
            ]
            for unit in units
        }

    def _segment_for(self, flat: FlatParams, *, dtype: torch.dtype) -> Segment | None:
        """Sharded gradients are cut into slices flat by flat; replicated ones of a dtype go together.

        Of a flat with less than one aligned block for each piece, nothing lies in some pieces.
        """
        if not self.sharded:
            for segment in self.segments:
                if segment.dtype == dtype:
                    segment.add(flat)
                    return segment
        number, num_pieces = self.bucket.piece, self.bucket.num_pieces
        piece = flat.layout.piece(number, num_pieces=num_pieces) if num_pieces > 1 else None
        if piece is not None and not piece.num_elements:
            return None
        segment = Segment(
            flat,
            name=f"{self.name} {len(self.segments)}",
            dtype=dtype,
            is_freed=self.sharded,
            group=self._setting.groups.reduce,
            memory=self._setting.gradient_memory,
            piece=piece,
        )
        self.segments.append(segment)
        return segment

    def take_grads(self, unit: Unit) -> None:
        """Move a unit's gradients into the buffer; a parameter without one counts as zero."""
        unit.grads.close()
        weight = self._setting.passes.weight(num_ranks=self._setting.groups.mesh.num_ranks)
        used = unit.grads.expected
        for flat, segment in self._places[unit.name]:
            without = segment.take(flat, weight=weight)
            used = used.difference(without) if without else used
        if weight and self.bucket.is_last:
            # By what autograd left: it also comes to parameters for which an autograd.Function returned None.
            unit.note_used(used)
        self._setting.tape.record(Kind.TAKE_GRADS, self.bucket.taken_as(unit.name))

    def keep(self) -> None:
        """Leave the gradients in the buffers for a later pass."""
        for segment in self.segments:
            segment.keep()

    @property
    def holds(self) -> bool:
        return any(segment.holds for segment in self.segments)

    def forget(self, names: AbstractSet[str]) -> None:
        """Clear what is held for the parameters of these names; with all of them, the buffer goes."""
        for segment in self.segments:
            segment.forget(names)

    def add_held(self, held: dict[int, Tensor]) -> None:
        """Add what is held for each parameter, by id; of a piece, to a tensor that all pieces fill."""
        for segment in self.segments:
            for flat in segment.flats if segment.holds else ():
                if segment.piece is not None and not segment.piece.start:
                    sizes = zip(flat.params, flat.layout.shapes, strict=True)
                    held |= {id(p): torch.empty(shape, dtype=segment.dtype, device=flat.device) for p, shape in sizes}
                for index, part, view in segment.places(flat):
                    key = id(flat.params[index])
                    if part is None:
                        held[key] = view
                    else:
                        held[key].view(-1)[part] = view

    def discard(self) -> None:
        """Give up the buffers: the bucket is not used any more."""
        for segment in self.segments:
            segment.discard()

    def hold(self, held: dict[int, Tensor]) -> None:
        """Take over what another bucket has held."""
        for segment in self.segments:
            for flat in segment.flats:
                for index, part, view in segment.places(flat):
                    key = id(flat.params[index])
                    view.copy_(held.pop(key) if part is None else held[key].reshape(-1)[part])
                if segment.piece is not None and segment.piece.is_last:
                    for parameter in flat.params:
                        del held[id(parameter)]
        self.keep()

    def start(self) -> None:
        """Sum over the ranks."""
        group = self._setting.groups.reduce if self.sharded else self._setting.groups.reduce_world
        group.log.name = self._reduces
        for segment in self.segments:
            buffer = segment.buffer
            assert buffer is not None
            if self.sharded:
                segment.begin(self._setting.collectives.reduce_scatter(buffer, group=group, own=segment.own))
            else:
                segment.begin(self._setting.collectives.all_reduce(buffer, group=group))
        self._setting.tape.record(Kind.REDUCE, self.name, self._num_bytes)

    def start_locally(self) -> None:
        """Sum over a group of one rank: the sums are there."""
        for segment in self.segments:
            segment.begin(DONE)
        self._setting.tape.record(Kind.REDUCE, self.name, self._num_bytes)

    def finish(self) -> None:
        """Wait for the sums, average them, and give each owner its gradient, unless its slice is to cross first."""
        for segment in self.segments:
            segment.finish()
            if not self.sharded:
                self._deliver_whole(segment)
            elif not self.crosses:
                self._deliver_slice(segment, segment.own)
        self._setting.tape.record(Kind.WAIT_REDUCE, self.name, self._num_bytes)

    def start_slice(self) -> None:
        """Sum this rank's slice over `replicate`: a copy of it, so that the buffer can go meanwhile."""
        self._setting.groups.replicate.log.name = self._reduces_slice
        for segment in self.segments:
            segment.begin(
                self._setting.collectives.all_reduce(segment.take_slice(), group=self._setting.groups.replicate)
            )
        self._setting.tape.record(Kind.REDUCE_SLICE, self.name, self._slice_bytes)

    def finish_slice(self) -> None:
        """Wait for the sum of the slice, average it, and give it to its owner."""
        for segment in self.segments:
            segment.finish()
            (flat,) = segment.flats
            assert segment.buffer is not None
            if segment.piece is not None:
                self._deliver_slice(segment, segment.buffer)
                continue
            # The slice is a copy already: in the dtype of the gradients it becomes them.
            flat.grads.add(segment.buffer.to(flat.master_dtype).mul_(self.scale))
            segment.release()
            announce(self._setting.events.grads_averaged, flat)
        self._setting.tape.record(Kind.WAIT_SLICE, self.name, self._slice_bytes)

    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def _slice_bytes(self) -> int:
        return self._num_bytes() // self._setting.groups.reduce.size

    def drop(self) -> None:
        """Drop a reduction that a backward that raised has left, once it no longer writes."""
        for segment in self.segments:
            segment.drop()

    def abandon(self) -> None:
        """Drop everything; reductions that were captured never run."""
        for segment in self.segments:
            segment.abandon()

    def _deliver_slice(self, segment: Segment, sums: Tensor | None) -> None:
        """Give a flat the average of its slice: a copy, so that the buffer can be freed.

        Pieces bring their parts of it one by one; with the last one it is complete.
        """
        (flat,), piece = segment.flats, segment.piece
        assert sums is not None
        average = flat.grads.begun
        if average is None:
            size = flat.layout.slice_elements
            average = self._setting.gradient_memory.empty(
                segment.name, size, dtype=flat.master_dtype, device=sums.device
            )
        part = average if piece is None else average[piece.start : piece.stop]
        if flat.master_dtype == segment.dtype:
            torch.mul(sums, self.scale, out=part)
        else:
            part.copy_(sums).mul_(self.scale)
        is_complete = piece is None or piece.is_last
        flat.grads.add(average) if is_complete else flat.grads.begin(average)
        segment.release()
        if is_complete:
            announce(self._setting.events.grads_averaged, flat)

    def _deliver_whole(self, segment: Segment) -> None:
        assert segment.buffer is not None
        if self.scale != 1:
            segment.buffer.mul_(self.scale)
        for flat, part, views in zip(segment.flats, segment.parts(), segment.gradients(), strict=True):
            if flat.master_dtype == segment.dtype:
                flat.grads.add(part, views=views)
            else:
                flat.grads.add(part.to(flat.master_dtype))
        segment.release()
