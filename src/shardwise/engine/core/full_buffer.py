"""The full buffer: what modules compute with.

Parameters are views of it, in the compute dtype. It is freed by resizing its storage to 0, so that what autograd saved
of the parameters is valid again as soon as it is gathered again. Weights that are gathered in
fewer bits are views of a full buffer of bytes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from shardwise.base.vocabulary.layout import BufferCut, Layout
from shardwise.comm.groups.groups import MeshGroups
from shardwise.engine.core.guests import HostMemory, NarrowBuffer
from shardwise.engine.core.master import Gathered, Master
from shardwise.plan.placement import SHARDED, Where

_AT_ONCE: AbstractContextManager[None] = nullcontext()


class FullBuffer(Gathered):
    """The parameters of one unit and one dtype, end to end.

    views       the parameters' places
    own         this rank's slice, which it sends in a gather
    whole       it has memory; with the values of all ranks, once `gathering` is waited for
    followed    a module holds on to the memory of a parameter by another name (guards/carried.py)
    """

    def __init__(
        self,
        layout: Layout,
        *,
        dtype: torch.dtype,
        sharded: bool,
        device: torch.device,
        groups: MeshGroups,
        narrow: NarrowBuffer | None = None,
    ) -> None:
        self.sharded = sharded
        self.narrow = narrow
        self.layout, self._groups = layout, groups
        self._cut = layout.cut()
        # Empty until it is laid out.
        self.buffer = torch.empty(0, dtype=torch.uint8 if narrow else dtype, device=device)
        self.views: list[Tensor] = []
        self.followed = False
        # A context in which its memory is always at one address; None: anywhere.
        self._slot: AbstractContextManager[None] | None = None

    def lay_out(self) -> None:
        """Allocate it, and make the parameters' places in it."""
        # Zeros, because the padding is communicated too and should not be what happened to lie there.
        self.buffer = torch.zeros(self.layout.num_elements, dtype=self.buffer.dtype, device=self.buffer.device)
        self._storage = self.buffer.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        # Made while there is storage behind them: a view of freed storage can be kept, but not made.
        self.views = self.views_of(self.buffer) if self.narrow is None else self.narrow.lay_out(self.buffer)
        self.own = self.buffer[self.part(SHARDED)]
        self.whole = True

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a buffer of this layout, one per parameter, in its shape."""
        views = cut_pieces(buffer, self._cut)
        return [
            view if len(shape) == 1 else view.view(shape) for view, shape in zip(views, self.layout.shapes, strict=True)
        ]

    def part(self, where: Where) -> slice:
        """Return the elements of a buffer of this layout that this rank holds of what is sharded so.

        Ranks of the replicate axis hold the parts of one slice end to end.
        """
        size, first = self.layout.num_elements, 0
        for is_cut, group in (
            (where.is_sharded, self._groups.gather),
            (where.is_sharded_across, self._groups.replicate),
        ):
            if is_cut:
                size //= group.size
                first += group.index * size
        return slice(first, first + size)

    def allocate_in(self, slot: AbstractContextManager[None] | None) -> None:
        """Allocate it in this context from now on."""
        self._slot = slot

    def follow(self) -> None:
        """Note that a module holds on to its memory."""
        self.followed = True

    def make_room(self) -> None:
        """Allocate its memory, where it was freed."""
        if self.gathering is not None:
            self.wait()
        if not self.whole:
            with self._slot or nullcontext():
                self._storage.resize_(self.num_bytes)
            self.whole = True

    def loading(self, master: Master) -> AbstractContextManager[None]:
        """Load what this rank owns in this block, and gather it; from host memory, while the device computes."""
        return _AT_ONCE if master.host is None else self._loading(master, master.host)

    @contextmanager
    def _loading(self, master: Master, host: HostMemory) -> Iterator[None]:
        with host.loading(after=master.update):
            yield
        self.begin(host.arrival(self.gathering, then=master.was_read))

    def load(self, master: Master) -> None:
        """Cast what this rank owns into its place."""
        if self.narrow is not None:
            self.narrow.load_own()
        elif not master.aliased:
            self.own.copy_(master.staged, non_blocking=True)

    def free(self) -> None:
        """Give its memory back; its views stay and come back to life with the next gather."""
        if self.gathering is not None:
            self.wait()
        self._storage.resize_(0)
        self.whole = False

    def discard(self) -> None:
        """Give it up."""
        self.buffer = self.own = self.buffer.new_empty(0)
        self._storage = self.buffer.untyped_storage()
        self.views = []
        self.narrow = None


def cut_pieces(buffer: Tensor, cut: BufferCut) -> list[Tensor]:
    """Return the parts of a buffer that a cut is for."""
    pieces = torch.split_with_sizes(buffer, cut.sizes)
    return [pieces[place] for place in cut.places]
