"""The buffers of a unit's parameters: the full one that modules compute with, and the slice that a rank owns.

full      compute dtype; parameters are views of it. Freed by resizing its storage to 0, so that what autograd
          saved of the parameters is valid again as soon as it is gathered again.
master    what the optimizer steps: the owned slice where optim is sharded, else everything. Where params are
          replicated and compute in the master's dtype it is not a second copy but a view of `full`. It may
          live in host memory; then it is staged there in the compute dtype, so that less crosses the bus.

Weights that are gathered in fp8 (fp8_bytes.py) are views of a full buffer of bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Collectives, Work, own_slice
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import CollectiveName
from shardwise.engine.core.fp8_bytes import Fp8Bytes
from shardwise.engine.core.host_states import HostMemory
from shardwise.engine.core.master_writes import MasterWrites
from shardwise.engine.core.precision import torch_dtype
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program.buffers import FlatSpec
from shardwise.torch_internals import torch_private
from shardwise.torch_internals.torch_private import DisableTorchFunctionSubclass
from shardwise.vocabulary.layout import ALIGNMENT, BufferCut

_AT_ONCE: AbstractContextManager[None] = nullcontext()

FOR_STATE = CollectiveName("gather for a state dict")


@dataclass(slots=True, kw_only=True)
class Owned:
    """The part of one parameter that this rank's optimizer steps."""

    parameter: nn.Parameter
    index: int
    start: int
    stop: int


class FlatBuffers:
    """Parameters of one unit and one dtype in one buffer: all of them frozen at first, or all trained."""

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        spec: FlatSpec,
        placement: Placement,
        device: torch.device,
        groups: MeshGroups,
        collectives: Collectives,
        alignment: int = ALIGNMENT,
        host: HostMemory | None = None,
    ) -> None:
        self.params = params
        self.describe(spec)
        self.placement = placement
        self.device = device
        self.groups = groups
        self.collectives = collectives
        self.host = host
        self.compute_dtype, self.master_dtype = torch_dtype(spec.compute_dtype), torch_dtype(spec.master_dtype)
        self.reduce_dtype = torch_dtype(spec.reduce_dtype)
        self.has_gradients = spec.has_gradients
        self.unstepped = spec.unstepped
        self.alignment = alignment
        self.layout = spec.layout(num_slices=groups.gather.size, alignment=alignment)
        self._cut = self.layout.cut()
        # Those whose piece of the buffer does not have their shape as it is.
        self._shaped = [(index, shape) for index, shape in enumerate(self.layout.shapes) if len(shape) != 1]
        # None if what is gathered is of the compute dtype.
        self.fp8: Fp8Bytes | None = None
        if spec.num_fp8 and placement.params is SHARDED:
            self.fp8 = Fp8Bytes(self.layout, num_fp8=spec.num_fp8, dtype=self.compute_dtype)
        # Empty until it is laid out.
        self.full = torch.empty(0, dtype=torch.uint8 if self.fp8 else self.compute_dtype, device=device)
        self.full_views: list[Tensor] = []
        # Whether an update of the master is an update of the full buffer.
        self.aliased = host is None and placement.params is not SHARDED and self.compute_dtype == self.master_dtype
        if placement.params is not SHARDED:
            self.lay_out()
        # The update that is writing the master in host memory, and what it reads meanwhile.
        self.update: Any = None
        self.in_use: Any = None
        self._master = self._make_master()
        # What is copied into the full buffer; the master itself, where it need not be staged.
        self.staged = self._master
        if host is not None and self.compute_dtype != self.master_dtype:
            self.staged = host.zeros(self._master.numel(), dtype=self.compute_dtype)
        self.owned = self._own()
        # What somebody else wrote into the master; whether somebody got hold of the module's parameters.
        self.writes = MasterWrites(self._master)
        self.touched = False
        # Whether a module holds on to the memory of a parameter by another name (carried.py).
        self.followed = False
        # A context in which memory for the full buffer is always at one address; None: anywhere.
        self.slot: AbstractContextManager[None] | None = None
        self.gathering: Work | None = None

    @property
    def master(self) -> Tensor:
        """What the optimizer steps; an update that is still writing it is waited for."""
        self.settle()
        return self._master

    @property
    def host_master(self) -> Tensor:
        """The master in host memory, without a wait: for the copies of updates, which are in order among themselves."""
        return self._master

    @property
    def is_separate(self) -> bool:
        """Whether the master is other memory than the full buffer."""
        return self._master is not self.full

    @property
    def is_staged(self) -> bool:
        """Whether gathers read a copy of the master in another dtype."""
        return self.staged is not self._master

    @property
    def stepped_on(self) -> torch.device:
        """The device that computes the update."""
        return self.device if self.host is None or self.host.keeps_grads else self._master.device

    def settle(self) -> None:
        """Wait until an update that passes through the device has written host memory."""
        if self.update is not None:
            assert self.host is not None
            self.host.settle(self.update)
            self.update = self.in_use = None

    def describe(self, spec: FlatSpec) -> None:
        """Take a spec of the same parameters: their names may have changed."""
        self.spec = spec
        self.names = [param.name for param in spec.params]

    def lay_out(self) -> None:
        """Make the full buffer and the parameters' places in it; where parameters are sharded, its memory goes again.

        Of several buffers, once the masters of all are there: one that came later would come to lie in that memory,
        which could then not be given back.
        """
        if self.full_views:
            return
        # Zeros, because the padding is communicated too and should not be what happened to lie there.
        self.full = torch.zeros(self.layout.num_elements, dtype=self.full.dtype, device=self.device)
        self._storage = self.full.untyped_storage()
        self.full_bytes = self._storage.nbytes()
        # Made while there is storage behind them: a view of freed storage can be kept, but not made.
        self.full_views = self.views(self.full) if self.fp8 is None else self.fp8.lay_out(self.full)
        self.own_full = own_slice(self.full, group=self.groups.gather)
        if self.fp8 is not None:
            parts = [(part.index, part.start, part.stop) for part in self.owned]
            self.fp8.own(parts, own_full=self.own_full, staged=self.staged)
        self.whole = True
        if self.placement.params is SHARDED:
            self._storage.resize_(0)
            self.whole = False

    def _make_master(self) -> Tensor:
        optim_sharded = self.placement.optim is SHARDED
        whole_size = self.layout.num_elements
        size = self.layout.slice_elements if optim_sharded else whole_size
        if self.host is not None:
            return self.host.zeros(size, dtype=self.master_dtype)
        if not self.aliased:
            return torch.zeros(size, dtype=self.master_dtype, device=self.device)
        # As `data`: what a gather writes into the full buffer does not count as a write into the slice.
        return own_slice(self.full, group=self.groups.gather).data if optim_sharded else self.full

    def _own(self) -> list[Owned]:
        """Return the parts that the optimizer steps: 1-D views of the owned slice, or whole parameters.

        Where the master is the full buffer, those are the module's own parameters.
        """
        if self.placement.optim is SHARDED:
            parts = self.layout.owned(self.groups.gather.index)
            views = [self._master[start:stop] for _, start, stop in parts]
        else:
            parts = [(i, offset, offset + size) for i, (offset, size) in enumerate(self.layout.sizes())]
            views = [self._master[start:stop].view(self.params[i].shape) for i, start, stop in parts]
        return [
            Owned(
                parameter=self.params[i] if not self.is_separate else parameter_like(self.params[i], view),
                index=i,
                start=start,
                stop=stop,
            )
            for (i, start, stop), view in zip(parts, views, strict=True)
        ]

    @property
    def block(self) -> int:
        """Return the size of the blocks that an optimizer works on, between which slices are cut; 1 without blocks."""
        return self.alignment if self.alignment > ALIGNMENT and self.placement.optim is SHARDED else 1

    @torch.no_grad()
    def fill(self, index: int, value: Tensor) -> None:
        """Take the values of one parameter, given whole, into the master (and what is whole of the full buffer)."""
        self.writes.before_own()
        flat = value.detach().reshape(-1)
        offset, size = self.layout.offsets[index], prod(self.layout.shapes[index])
        if self.placement.optim is SHARDED:
            first = self.groups.gather.index * self.layout.slice_elements
            start, stop = max(offset, first), min(offset + size, first + self.layout.slice_elements)
            if start < stop:
                self.master[start - first : stop - first].copy_(flat[start - offset : stop - offset])
        else:
            self.master[offset : offset + size].copy_(flat)
        if self.placement.params is not SHARDED:
            self.full[offset : offset + size].copy_(flat)
        self.writes.after_own()

    @torch.no_grad()
    def take_over(self) -> None:
        """Values that were written into the module's parameters into the master, which keeps its digits elsewhere."""
        self.wait_gather()
        self.writes.before_own()
        full = own_slice(self.full, group=self.groups.gather) if self.placement.optim is SHARDED else self.full
        master = self.master.to(self.device)
        self.master.copy_(torch.where(full != master.to(full.dtype), full.to(master.dtype), master))
        self.stage()
        self.writes.after_own()

    def lend_master(self) -> None:
        """Somebody gets at the master's memory in a way that torch does not count."""
        self.wait_gather()
        self.settle()
        self.writes.lend()

    def stage(self) -> None:
        """Copy a changed master to where gathers read it, if that is other memory; an update under way does it, too."""
        if self.is_staged and self.update is None:
            with torch.no_grad():
                self.staged.copy_(self._master)

    def attach(self, index: int, parameter: nn.Parameter) -> None:
        """Make the module's parameter, which may be a new one where it was on the meta device, a view of the buffer."""
        parameter.data = self.full_views[index]
        if self.compute_dtype != self.master_dtype:
            # Averaged gradients are of the master's dtype.
            parameter.grad_dtype = None
        self.params[index] = parameter
        if not self.is_separate:
            self.owned[index].parameter = parameter

    def make_room(self) -> None:
        """Memory for the full buffer, where it was freed."""
        if self.gathering is not None:
            self.wait_gather()
        if not self.whole:
            with self.slot or nullcontext():
                self._storage.resize_(self.full_bytes)
            self.whole = True

    def loading(self) -> AbstractContextManager[None]:
        """Load what this rank owns in this block, and gather it; from host memory, while the device computes."""
        return _AT_ONCE if self.host is None else self._loading(self.host)

    @contextmanager
    def _loading(self, host: HostMemory) -> Iterator[None]:
        with host.loading(after=self.update):
            yield
        self.gathering = host.arrival(self.gathering)

    def load_own(self) -> None:
        """Cast what this rank owns into its place in the full buffer."""
        if self.fp8 is not None:
            self.fp8.load_own()
        elif not self.aliased:
            self.own_full.copy_(self.staged, non_blocking=True)

    def wait_gather(self) -> None:
        """Wait for the gather; then the full buffer may be read."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            # It was waited for as well.
            self.in_use = None

    def free(self) -> None:
        """Give the full buffer's memory back; its views stay and come back to life with the next gather."""
        if self.gathering is not None:
            self.wait_gather()
        self._storage.resize_(0)
        self.whole = False

    @property
    def holds_all(self) -> bool:
        """Return whether this rank has all of the master, here or in the full buffer."""
        return self.placement.optim is not SHARDED or self.aliased or self._is_one_slice

    @property
    def _is_one_slice(self) -> bool:
        return self.layout.slice_elements == self.layout.num_elements

    @torch.no_grad()
    def full_master(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of the master; cast first, so that no more is sent than is asked for. Collective unless `holds_all`."""
        wanted = dtype or self.master_dtype
        if self.placement.optim is not SHARDED:
            return self.master.to(wanted, copy=True)
        if self.aliased:
            self.wait_gather()
            return self.full.to(wanted, copy=True)
        return self.whole_of(self.master, dtype=wanted)

    @torch.no_grad()
    def whole_of(self, mine: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of what `mine` is this rank's part of, as the master is; itself, where that is all. Else collective."""
        if self.placement.optim is not SHARDED:
            return mine
        if self._is_one_slice:
            return mine.to(self.device, dtype or mine.dtype, copy=True)
        whole = torch.zeros(self.layout.num_elements, dtype=dtype or mine.dtype, device=self.device)
        own_slice(whole, group=self.groups.gather).copy_(mine)
        self.groups.gather.log.name = FOR_STATE
        self.collectives.all_gather(whole, group=self.groups.gather).wait()
        return whole

    def discard(self) -> None:
        """Give the memory back: the parameters lie in other buffers now."""
        self.settle()
        self.full = self._master = self.staged = self.own_full = self.full.new_empty(0)
        self._storage = self.full.untyped_storage()
        self.writes = MasterWrites(self._master)
        self.owned, self.full_views = [], []
        self.fp8 = None

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a buffer of this layout, one per parameter, in its shape."""
        views = cut_pieces(buffer, self._cut)
        for index, shape in self._shaped:
            views[index] = views[index].view(shape)
        return views


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return what an optimizer steps in place of a parameter: of its class, and with the same attributes for ever.

    An optimizer may read them (`p.no_weight_decay`), and they may be set after `prepare`.
    """
    own_class = getattr(type(parameter), "_own_class", type(parameter))
    with unguarded():
        made: nn.Parameter = torch_private.make_subclass(own_class, values, parameter.requires_grad)
    made.__dict__ = parameter.__dict__
    return made


def unguarded() -> Any:
    """Return a context in which parameters that a guard watches (guards/guard.py) are handled without asking it."""
    return DisableTorchFunctionSubclass()


@torch.no_grad()
def refresh(flats: Sequence[FlatBuffers]) -> None:
    """Cast updated unsharded masters into the full buffers, all in one call."""
    copied = [flat for flat in flats if not flat.aliased]
    if copied:
        torch._foreach_copy_([flat.full for flat in copied], [flat.master for flat in copied])


def cut_pieces(buffer: Tensor, cut: BufferCut) -> list[Tensor]:
    """Return the parts of a buffer that a cut is for."""
    pieces = torch.split_with_sizes(buffer, cut.sizes)
    return [pieces[place] for place in cut.places]
