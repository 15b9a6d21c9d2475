"""A buffer in which gradients meet: where each of them goes, and its use from step to step."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.torch_internals import torch_private
from shardwise.base.vocabulary.layout import BufferPiece
from shardwise.comm.groups.collectives import Work, own_slice
from shardwise.comm.groups.groups import Group
from shardwise.engine.core.core_setting import GradientMemory
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.full_buffer import cut_pieces


class Segment:
    """Flat buffers whose gradients share one buffer and one collective: all of one dtype.

    `is_freed`: its memory goes when it has done its work; else the gradients lie in it, and it goes with them.
    `group`: whose ranks own a slice of it each. `memory`: where gradients lie. `piece`: the part of a flat's gradients
    that is reduced here; None: all of them.
    """

    def __init__(
        self,
        flat: FlatParams,
        *,
        name: str,
        dtype: torch.dtype,
        is_freed: bool,
        group: Group,
        memory: GradientMemory,
        piece: BufferPiece | None = None,
    ) -> None:
        self.name = name
        self.piece = piece
        self.dtype = dtype
        self.is_freed = is_freed
        self.group = group
        self._memory = memory
        self.flats: list[FlatParams] = []
        self.num_elements = self.num_bytes = 0
        self.add(flat)
        # Of all gradients, this rank's slice of it, and their places in it, flat by flat; and a copy of the slice, once
        # that is summed over the shard axis, which goes over `replicate`.
        self.buffer: Tensor | None = None
        self.slice: Tensor | None = None
        self.own: Tensor | None = None
        self._views: list[list[Tensor]] = []
        # Whether earlier passes have left gradients in the buffer, or in the slice.
        self.holds = self.holds_slice = False
        self.work: Work | None = None
        self._kept: _Kept | None = None

    def add(self, flat: FlatParams) -> None:
        self.flats.append(flat)
        self.num_elements += flat.layout.num_elements if self.piece is None else self.piece.num_elements
        self.num_bytes = self.num_elements * self.dtype.itemsize

    def views(self, flat: FlatParams) -> list[Tensor]:
        """Return the places of a flat's gradients in the buffer, which is allocated at the first call."""
        if self.buffer is None:
            self._renew(flat.device)
        return self._views[self.flats.index(flat)]

    def places(self, flat: FlatParams) -> Iterator[tuple[int, slice | None, Tensor]]:
        """Yield (parameter, the elements that lie here, their place); None: all of them, in the shape of it."""
        views = self.views(flat)
        if self.piece is None:
            yield from ((index, None, view) for index, view in enumerate(views))
            return
        for (index, start, stop), view in zip(self.piece.parts, views, strict=True):
            yield index, slice(start, stop), view

    def _renew(self, device: torch.device) -> None:
        """Return the last step's buffer with its views if it can be used again; else a new one."""
        if self._kept is not None and (self.is_freed or self._kept.is_unused()):
            self.buffer, self.own, self._views = self._kept.buffer, self._kept.own, self._kept.views
            if self.is_freed:
                self.buffer.untyped_storage().resize_(self.num_bytes)
            return
        if self.is_freed:
            self.buffer = torch.empty(self.num_elements, dtype=self.dtype, device=device)
        else:
            self.buffer = self._memory.empty(self.name, self.num_elements, dtype=self.dtype, device=device)
        self._views = self._cut()
        if self.is_freed:
            # Its views come back to life with its memory, and need not be made again.
            self.own = own_slice(self.buffer, group=self.group)
            self._kept = _Kept(buffer=self.buffer, own=self.own, views=self._views)

    def parts(self) -> Sequence[Tensor]:
        """Yield the buffer, flat by flat."""
        assert self.buffer is not None
        if len(self.flats) == 1:
            return [self.buffer]
        return torch.split_with_sizes(self.buffer, [flat.layout.num_elements for flat in self.flats])

    def _cut(self) -> list[list[Tensor]]:
        if self.piece is not None:
            assert self.buffer is not None
            return [cut_pieces(self.buffer, self.piece.cut)]
        return [flat.full.views_of(part) for flat, part in zip(self.flats, self.parts(), strict=True)]

    def take(self, flat: FlatParams, *, weight: float) -> list[int]:
        """Write a flat's gradients × weight into their places, or add them to those of earlier passes.

        With weight 0 they do not even count as NaN; a parameter without one counts as zero. Returns the parameters
        without one, by id.
        """
        views = self.views(flat)
        if self.piece is None:
            taken = given = flat.grads.take_off()
        else:
            taken = flat.grads.take_rows(is_last=self.piece.is_last)
            rows = ((taken[index], start, stop) for index, start, stop in self.piece.parts)
            given = [None if row is None else row[start:stop] for row, start, stop in rows]
        grads = [grad for grad in given if grad is not None and not grad.is_sparse]
        without: list[int] = []
        if not weight or len(grads) < len(views) or self.piece is not None:
            without = [id(parameter) for parameter, grad in zip(flat.params, taken, strict=True) if grad is None]
            views, grads = self._present(views, given if weight else [None] * len(views))
        if views:
            self._write(views, grads, weight=weight)
        if self.piece is None or self.piece.is_last:
            flat.grads.release_handed()
        return without

    def _write(self, views: list[Tensor], grads: list[Tensor], *, weight: float) -> None:
        if self.holds:
            # In the buffer's dtype also where the gradients are narrower.
            torch._foreach_add_(views, grads, alpha=weight)
            return
        torch._foreach_copy_(views, grads)
        if weight != 1.0:
            torch._foreach_mul_(views, weight)

    def _present(self, views: list[Tensor], given: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the places of existing gradients, and those gradients as dense tensors; zero the other places."""
        present = []
        for view, grad in zip(views, given, strict=True):
            if grad is not None:
                present.append((view, grad.to_dense() if grad.is_sparse else grad))
            elif not self.holds:
                view.zero_()
        return [view for view, _ in present], [grad for _, grad in present]

    def keep(self) -> None:
        """Leave the gradients in the buffer for a later pass, or in the slice where they are summed already."""
        self.holds = self.buffer is not None
        self.holds_slice = self.slice is not None

    def forget(self, names: AbstractSet[str]) -> None:
        """Clear what is held for the parameters of these names; with all of them, the buffer goes."""
        is_all = all(name in names for flat in self.flats for name in flat.names)
        if self.slice is not None:
            self._forget_slice(self.slice, names)
            if is_all:
                self._drop_slice()
        if not self.holds:
            return
        for flat in self.flats:
            for index, _, view in self.places(flat):
                if flat.names[index] in names:
                    view.zero_()
        if is_all:
            self.holds = False
            self.release()

    def _forget_slice(self, held: Tensor, names: AbstractSet[str]) -> None:
        (flat,) = self.flats
        mask = torch.zeros(self.num_elements, dtype=torch.bool, device=held.device)
        if self.piece is None:
            indices, places = list(range(len(flat.names))), flat.full.views_of(mask)
        else:
            indices, places = [index for index, _, _ in self.piece.parts], cut_pieces(mask, self.piece.cut)
        for index, place in zip(indices, places, strict=True):
            place.fill_(flat.names[index] in names)
        held.masked_fill_(own_slice(mask, group=self.group), 0)

    def add_held(self, held: dict[int, Tensor]) -> None:
        """Add what is held for each parameter, by id; of a piece, to a tensor that all pieces fill."""
        for flat in self.flats if self.holds else ():
            if self.piece is not None and not self.piece.start:
                sizes = zip(flat.params, flat.layout.shapes, strict=True)
                held |= {id(p): torch.empty(shape, dtype=self.dtype, device=flat.device) for p, shape in sizes}
            for index, part, view in self.places(flat):
                key = id(flat.params[index])
                if part is None:
                    held[key] = view
                else:
                    held[key].view(-1)[part] = view

    def hold(self, held: dict[int, Tensor]) -> None:
        """Take over what another segment has held."""
        for flat in self.flats:
            for index, part, view in self.places(flat):
                key = id(flat.params[index])
                view.copy_(held.pop(key) if part is None else held[key].reshape(-1)[part])
            if self.piece is not None and self.piece.is_last:
                for parameter in flat.params:
                    del held[id(parameter)]
        self.keep()

    def begin(self, work: Work) -> None:
        """Wait for this reduction, which was issued, before the sums are read."""
        self.work = work

    def finish(self) -> None:
        """Wait for the reduction. What earlier passes have left is in it."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.holds = False

    def take_slice(self) -> None:
        """Copy this rank's slice, which is summed once more, and release the buffer meanwhile.

        It is added to that of earlier passes.
        """
        assert self.own is not None
        self.slice = self.own.clone() if self.slice is None else self.slice.add_(self.own)
        self.release()

    def finish_slice(self) -> Tensor:
        """Wait for the reduction of the slice, and return it."""
        sums = self.slice
        assert sums is not None
        self.finish()
        self._drop_slice()
        return sums

    def _drop_slice(self) -> None:
        self.slice, self.holds_slice = None, False

    def release(self) -> None:
        """Release the buffer; its memory stays for the next step unless it is freed."""
        if self.buffer is None:
            return
        if self.is_freed and self._kept is not None:
            self._kept.buffer.untyped_storage().resize_(0)
        self.buffer = self.own = None
        self._views = []

    def drop(self) -> None:
        """Release the buffer once nothing writes it, unless it holds gradients of earlier passes, and what other pieces
        have yet to take.
        """
        is_crossing = self.work is not None and self.buffer is None
        if self.work is not None:
            self.work.wait()
            self.work = None
        if is_crossing or not self.holds_slice:
            self._drop_slice()
        if not self.holds:
            self.release()
        if self.piece is not None:
            self.flats[0].grads.drop_pieces()

    def discard(self) -> None:
        """Give up the buffer. Gradients that somebody holds keep its memory."""
        self.buffer = self.own = self._kept = None
        self._views = []
        self.holds = False
        self._drop_slice()

    @property
    def kept(self) -> Tensor | None:
        """Return the buffer whose memory stays for the next step, if any."""
        return self._kept.buffer if self._kept is not None and not self.is_freed else None

    def gradients(self) -> list[list[Tensor]]:
        """Views of the buffer that can be its parameters' gradients.

        On a CPU, where a new buffer costs a page fault every 4 KiB, it is used again when no gradient lies in it any
        more; so gradients are then views of their own, that can be counted.
        """
        assert self.buffer is not None
        if self.buffer.device.type != "cpu" or self._memory.places is not None:
            return self._views
        if self._kept is None or self._kept.buffer is not self.buffer:
            self._kept = _Kept(buffer=self.buffer, own=None, views=self._views)
        return self._cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A buffer that has done its work, with the views of it that are needed to fill it again."""

    buffer: Tensor
    own: Tensor | None
    views: list[list[Tensor]]

    def is_unused(self) -> bool:
        """Return whether no gradient refers to it any more: only the buffer, our views and this call do."""
        num_uses = int(torch_private.storage_use_count(self.buffer.untyped_storage()._cdata))
        return num_uses == 2 + sum(map(len, self.views))
