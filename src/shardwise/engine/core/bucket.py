"""Gradients: copied once into a buffer of the reduce dtype, summed over the ranks, handed to their owners.

Replicated gradients keep the buffer: it is the gradients. Sharded ones keep this rank's slice of it, which on a mesh
with a second axis is summed over that too, while backward continues. In an accumulation the buffer waits, and each pass
adds to what it holds.
"""

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import DONE, own_slice
from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.precision import torch_dtype
from shardwise.engine.core.segment import Segment
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.unit import Unit
from shardwise.program import Bucket, Kind


class ReduceBucket:
    """A bucket of the program at work."""

    def __init__(self, bucket: Bucket, *, units: list[Unit], setting: CoreSetting) -> None:
        self.bucket, self.name = bucket, bucket.name
        self._reduces = CollectiveName(f"{Kind.REDUCE.value} {bucket.name}")
        self._reduces_slice = CollectiveName(f"{Kind.REDUCE_SLICE.value} {bucket.name}")
        self.units = units
        self._setting = setting
        self._is_last = bucket.is_last
        self.sharded = units[0].placement.grads.is_sharded
        # Whether slices are summed over a second axis of the mesh too.
        self.crosses = self.sharded and self._setting.groups.replicate.size > 1
        self._scatters = units[0].placement.grads.is_sharded_across
        self._num_ranks = setting.groups.mesh.num_ranks
        self.scale = 1 / self._num_ranks
        self.segments: list[Segment] = []
        # Where the gradients of each unit go, and what the tape calls that.
        self._places: dict[str, tuple[str, list[tuple[FlatParams, Segment]]]] = {}
        for unit in units:
            dtypes = ((flat, torch_dtype(flat.spec.reduce_dtype)) for flat in unit.trained_flats)
            segments = ((flat, self._segment_for(flat, dtype=dtype)) for flat, dtype in dtypes)
            places = [(flat, segment) for flat, segment in segments if segment is not None]
            self._places[unit.name] = (bucket.taken_as(unit.name), places)

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
        weight = self._setting.passes.weight(num_ranks=self._num_ranks)
        used = unit.grads.expected
        taken_as, places = self._places[unit.name]
        for flat, segment in places:
            without = segment.take(flat, weight=weight)
            used = used.difference(without) if without else used
        if weight and self._is_last:
            # By what autograd left: it also comes to parameters for which an autograd.Function returned None.
            unit.note_used(used)
        self._setting.tape.record(Kind.TAKE_GRADS, taken_as)

    def start(self, *, is_local: bool = False) -> None:
        """Sum over the ranks; `is_local`: over a group of one rank, where the sums are there."""
        collectives, groups = self._setting.collectives, self._setting.groups
        group = groups.reduce if self.sharded else groups.reduce_world
        if not is_local:
            group.log.name = self._reduces
        for segment in self.segments:
            buffer = segment.buffer
            assert buffer is not None
            if is_local:
                segment.begin(DONE)
            elif self.sharded:
                segment.begin(collectives.reduce_scatter(buffer, group=group, own=segment.own))
            else:
                segment.begin(collectives.all_reduce(buffer, group=group))
        self._setting.tape.record(Kind.REDUCE, self.name, self._num_bytes)

    def finish(self) -> None:
        """Wait for the sums, average them, and give each owner its gradient, unless its slice is to cross first.

        That slice waits on this rank, and those of later passes are added to it until one of them lets it cross.
        """
        for segment in self.segments:
            segment.finish()
            if not self.sharded:
                self._deliver_whole(segment)
            elif self.crosses:
                segment.take_slice()
            else:
                self._deliver_slice(segment, segment.own)
        self._setting.tape.record(Kind.WAIT_REDUCE, self.name, self._num_bytes)

    def start_slice(self) -> None:
        """Sum this rank's slice over `replicate`; where gradients are sharded over that too, each rank gets a part."""
        group, collectives = self._setting.groups.replicate, self._setting.collectives
        group.log.name = self._reduces_slice
        reduces = collectives.reduce_scatter if self._scatters else collectives.all_reduce
        for segment in self.segments:
            assert segment.slice is not None
            segment.begin(reduces(segment.slice, group=group))
        self._setting.tape.record(Kind.REDUCE_SLICE, self.name, self._slice_bytes)

    def finish_slice(self) -> None:
        """Wait for the sum of the slice, average it, and give it to its owner."""
        for segment in self.segments:
            sums = segment.finish_slice()
            (flat,) = segment.flats
            if self._scatters:
                sums = own_slice(sums, group=self._setting.groups.replicate)
            if segment.piece is not None or self._scatters:
                self._deliver_slice(segment, sums)
                continue
            # The slice is a copy already: in the dtype of the gradients it becomes them.
            flat.grads.add(sums.to(flat.master_dtype).mul_(self.scale))
            announce(self._setting.events.grads_averaged, flat)
        self._setting.tape.record(Kind.WAIT_SLICE, self.name, self._slice_bytes)

    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def _slice_bytes(self) -> int:
        return self._num_bytes() // self._setting.groups.reduce.size

    def _deliver_slice(self, segment: Segment, sums: Tensor | None) -> None:
        """Give a flat the average of its slice: a copy, so that the buffer can be freed.

        Pieces bring their parts of it one by one; with the last one it is complete.
        """
        (flat,), piece = segment.flats, segment.piece
        assert sums is not None
        average = flat.grads.begun
        held = flat.full.part(self.units[0].placement.grads)
        size = held.stop - held.start
        if average is None:
            average = self._setting.gradient_memory.empty(
                segment.name, size, dtype=flat.master_dtype, device=sums.device
            )
        part = average
        if piece is not None:
            # It has its share of every part of the slice that a rank steps.
            part = average.view(size // flat.layout.slice_elements, -1)[:, piece.start : piece.stop]
        sums = sums.view(part.shape)
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
