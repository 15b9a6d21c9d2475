"""The buffers of a unit's parameters: the full one that modules compute with, and the slice that a rank owns.

full      compute dtype; parameters are views of it. Freed by resizing its storage to 0, so that what autograd
          saved of the parameters is valid again as soon as it is gathered again.
master    what the optimizer steps: the owned slice where optim is sharded, else everything. Where params are
          replicated and compute in the master's dtype it is not a second copy but a view of `full`. It may
          live in host memory; then it is staged there in the compute dtype, so that less crosses the bus.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Collectives, Work, own_slice
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import CollectiveName
from shardwise.engine.params.guard import unguarded
from shardwise.engine.params.host import HostCopies
from shardwise.engine.params.precision import torch_dtype
from shardwise.engine.params.slice_writes import MasterWrites
from shardwise.layout import BufferCut, cut_out
from shardwise.placement import SHARDED, Placement
from shardwise.program.buffers import FlatSpec

FOR_STATE = CollectiveName("gather for a state dict")


@dataclass(slots=True, kw_only=True)
class Owned:
    """The part of one parameter that this rank's optimizer steps."""

    parameter: nn.Parameter
    index: int
    start: int
    stop: int


class FlatParams:
    """Parameters of one unit and one dtype in one buffer."""

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        spec: FlatSpec,
        placement: Placement,
        device: torch.device,
        groups: MeshGroups,
        collectives: Collectives,
        host: HostCopies | None = None,
    ) -> None:
        self.params = params
        self.names = [param.name for param in spec.params]
        self.placement = placement
        self.device = device
        self.groups = groups
        self.collectives = collectives
        self.host = host
        compute_dtype, self.master_dtype = torch_dtype(spec.compute_dtype), torch_dtype(spec.master_dtype)
        self.reduce_dtype = torch_dtype(spec.reduce_dtype)
        self.has_gradients = spec.has_gradients
        self.layout = spec.layout(num_slices=groups.gather.size)
        self._cut = self.layout.cut()
        # Those whose piece of the buffer does not have their shape as it is.
        self._shaped = [(index, shape) for index, shape in enumerate(self.layout.shapes) if len(shape) != 1]
        size = self.layout.num_elements
        # Zeros, because the padding is communicated too and should not be what happened to lie there.
        self.full = torch.zeros(size, dtype=compute_dtype, device=device)
        self.full_bytes = self.full.untyped_storage().nbytes()
        self.master = self._make_master()
        # What is copied into the full buffer; the master itself, where it need not be staged.
        self.staged = self.master
        if host is not None and compute_dtype != self.master_dtype:
            self.staged = host.zeros(self.master.numel(), dtype=compute_dtype)
        self.owned = self._own()
        # What somebody else wrote into the master; whether somebody got hold of the module's parameters.
        self.writes = MasterWrites(self.master)
        self.touched = False
        if placement.optim is SHARDED:
            self._owned_cut = cut_out([(p.start, p.stop) for p in self.owned], end=self.layout.slice_elements)
        # Made while there is storage behind them: a view of freed storage can be kept, but not made.
        self.full_views = self.views(self.full)
        self.gathering: Work | None = None
        # As ranks know it when they compare what they have issued; its unit's.
        self.gathers = FOR_STATE
        self.whole = True
        if placement.params is SHARDED:
            self.free()
        # The averaged gradients that `p.grad` showed before this backward, which are to be added to.
        self.hidden: list[Tensor | None] = [None] * len(params)
        self.awaits_grads = False
        # The averaged gradients that `p.grad` was given, where the owned part's are views of them.
        self.shown: list[Tensor | None] = [None] * len(params)
        # The buffers of averages that `p.grad` may show.
        self._averages: list[weakref.ref[Tensor]] = []
        # The parameters whose gradients this backward alone has made.
        self.with_new_grads: set[int] = set()

    def _make_master(self) -> Tensor:
        optim_sharded = self.placement.optim is SHARDED
        whole_size = self.layout.num_elements
        size = self.layout.slice_elements if optim_sharded else whole_size
        if self.host is not None:
            return self.host.zeros(size, dtype=self.master_dtype)
        if self.placement.params is SHARDED or self.full.dtype != self.master_dtype:
            return torch.zeros(size, dtype=self.master_dtype, device=self.device)
        # As `data`: what a gather writes into the full buffer does not count as a write into the slice.
        return own_slice(self.full, group=self.groups.gather).data if optim_sharded else self.full

    def _own(self) -> list[Owned]:
        """What the optimizer steps: 1-D views of the owned slice, or whole parameters in their own shape.

        Where the master is the full buffer, those are the module's own parameters.
        """
        if self.placement.optim is SHARDED:
            parts = self.layout.owned(self.groups.gather.index)
            views = [self.master[start:stop] for _, start, stop in parts]
        else:
            parts = [(i, offset, offset + size) for i, (offset, size) in enumerate(self.layout.sizes())]
            views = [self.master[start:stop].view(self.params[i].shape) for i, start, stop in parts]
        return [
            Owned(
                parameter=self.params[i]
                if self.master is self.full
                else nn.Parameter(view, requires_grad=self.params[i].requires_grad),
                index=i,
                start=start,
                stop=stop,
            )
            for (i, start, stop), view in zip(parts, views, strict=True)
        ]

    @property
    def aliased(self) -> bool:
        """Whether an update of the master is an update of the full buffer."""
        return self.master.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr()

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
        self.writes.lend()

    @torch.no_grad()
    def stage(self) -> None:
        """The master has changed."""
        if self.staged is not self.master:
            self.staged.copy_(self.master)

    def attach(self, index: int, parameter: nn.Parameter) -> None:
        """Make the module's parameter, which may be a new one where it was on the meta device, a view of the buffer."""
        parameter.data = self.full_views[index]
        self.params[index] = parameter
        if self.master is self.full:
            self.owned[index].parameter = parameter

    def gather(self) -> None:
        """Start to make the full buffer whole from the owned slices."""
        self.wait_gather()
        if not self.whole:
            self.full.untyped_storage().resize_(self.full_bytes)
            self.whole = True
        if not self.aliased:
            own_slice(self.full, group=self.groups.gather).copy_(self.staged, non_blocking=True)
        self.groups.gather.log.name = self.gathers
        self.gathering = self.collectives.all_gather(self.full, group=self.groups.gather)

    def wait_gather(self) -> None:
        """From here on the full buffer may be read."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Give the full buffer's memory back; its views stay and come back to life with the next gather."""
        self.wait_gather()
        self.full.untyped_storage().resize_(0)
        self.whole = False

    @torch.no_grad()
    def refresh(self) -> None:
        """After an update of a whole master: the full buffer again in the compute dtype."""
        if not self.aliased:
            self.full.copy_(self.master)

    @torch.no_grad()
    def full_master(self) -> Tensor:
        """All of the master, on every rank. Collective where optim is sharded."""
        if self.placement.optim is not SHARDED:
            return self.master.clone()
        whole = torch.zeros(self.layout.num_elements, dtype=self.master_dtype, device=self.device)
        own_slice(whole, group=self.groups.gather).copy_(self.master)
        self.groups.gather.log.name = FOR_STATE
        self.collectives.all_gather(whole, group=self.groups.gather).wait()
        return whole

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer of this layout, in their shapes."""
        views = _cut_out(buffer, self._cut)
        for index, shape in self._shaped:
            views[index] = views[index].view(shape)
        return views

    @property
    def shows_grads(self) -> bool:
        """Whether `p.grad` of the module's parameters is the averaged gradient."""
        return self.placement.grads is not SHARDED and self.full.dtype == self.master_dtype

    def has_grads(self) -> bool:
        return any(part.parameter.grad is not None for part in self.owned)

    def add_grads(self, average: Tensor, *, views: list[Tensor] | None = None) -> None:
        """Take this backward's averaged gradients, on top of those that are there: of the slice, or of everything.

        `views`: the parameters' places in it, if they are made already.
        """
        olds: list[Tensor] = []
        news: list[Tensor] = []
        self.awaits_grads = False
        self.with_new_grads.clear()
        shows_grads = self.shows_grads
        whole = [] if self.placement.grads is SHARDED else views or self.views(average)
        if shows_grads:
            self._averages = [held for held in self._averages if held() is not None]
            self._averages.append(weakref.ref(average if average._base is None else average._base))
            # The owned parts' gradients are views of the same memory.
            for index, (parameter, view) in enumerate(zip(self.params, whole, strict=True)):
                old = self.hidden[index]
                if old is not None:
                    olds.append(old)
                    news.append(view)
                else:
                    self.with_new_grads.add(index)
                shown = (view if old is None else old) if parameter.requires_grad else None
                parameter.grad = shown
                if self.master is not self.full:
                    self.shown[index] = shown
        if self.master is not self.full:
            owned_grads = self._owned_grads(average) if self.placement.optim is SHARDED else whole
            with unguarded():
                trained = [self.params[part.index].requires_grad for part in self.owned]
            for part, new, is_trained in zip(self.owned, owned_grads, trained, strict=True):
                if not is_trained:
                    continue
                old = part.parameter.grad
                if old is None:
                    part.parameter.grad = new
                    self.with_new_grads.add(part.index)
                elif not shows_grads:
                    olds.append(old)
                    news.append(new)
        if olds:
            if self.host is not None:
                self.host.land()
            torch._foreach_add_(olds, news)

    def _owned_grads(self, average: Tensor) -> Sequence[Tensor]:
        """The owned parts' places in a slice, which is cut out of everything where that is not done yet."""
        mine = average if self.placement.grads is SHARDED else own_slice(average, group=self.groups.gather)
        if self.host is not None:
            mine = self.host.fetch(mine)
        return _cut_out(mine, self._owned_cut)

    def shows_average(self, index: int) -> bool:
        """Whether `p.grad` is an average over all ranks, as far as nobody has replaced it."""
        grad = self.params[index].grad
        if grad is None:
            return False
        base = grad if grad._base is None else grad._base
        return any(held() is base for held in self._averages)

    def hide_grads(self) -> None:
        """Before backward: autograd must find no gradient, or it would add this rank's own to the average."""
        shows_grads = self.shows_grads
        with unguarded():
            for index, parameter in enumerate(self.params):
                grad = parameter.grad
                self.hidden[index] = grad if shows_grads else None
                if grad is not None:
                    parameter.grad = None
        self.awaits_grads = True

    def restore_grads(self) -> None:
        """Where no averages came, those of before backward count: what autograd left is this rank's own."""
        if not self.awaits_grads:
            return
        with unguarded():
            for parameter, average in zip(self.params, self.hidden, strict=True):
                parameter.grad = average
        self.awaits_grads = False

    def undo_grads(self) -> None:
        """After a backward that raised: the gradients of before it."""
        if not self.awaits_grads:
            self.drop_grads(set(self.with_new_grads))
        self.restore_grads()

    @property
    def can_undo_grads(self) -> bool:
        """Whether the backward that is under way has added nothing to gradients that were there before it."""
        added_to = (part.index not in self.with_new_grads for part in self.owned if part.parameter.grad is not None)
        return self.awaits_grads or not any(added_to)

    def follow_shown_grads(self) -> None:
        """Before an update: where `p.grad` was replaced, the owned part's gradient is cut out of the new one."""
        with unguarded():
            for part in self.owned:
                grad = self.params[part.index].grad
                if grad is not self.shown[part.index]:
                    self._follow_shown_grad(part, grad)

    def _follow_shown_grad(self, part: Owned, grad: Tensor | None) -> None:
        if grad is not None:
            start = self.groups.gather.index * self.layout.slice_elements + part.start - self.layout.offsets[part.index]
            part.parameter.grad = grad.reshape(-1)[start : start + part.stop - part.start]
        else:
            part.parameter.grad = None
        self.shown[part.index] = grad

    def drop_stale_grads(self) -> None:
        """Before forward: a gradient that was cleared in the optimizer is cleared in the model, and the reverse."""
        if not self.shows_grads or self.master is self.full:
            # There are none to be seen, or the model's parameters are the optimizer's.
            return
        for part in self.owned:
            if self.params[part.index].grad is None:
                part.parameter.grad = None
            elif part.parameter.grad is None:
                self.params[part.index].grad = None
        if not self.has_grads():
            # Also what this rank does not own a part of.
            for parameter in self.params:
                parameter.grad = None

    def drop_new_grad(self, index: int) -> None:
        """Take back a gradient that this backward alone has made: no rank used the parameter."""
        if index in self.with_new_grads:
            self.drop_grads({index})

    def drop_grads(self, indices: Collection[int]) -> None:
        """Forget the gradients of these parameters."""
        for part in self.owned:
            if part.index in indices:
                part.parameter.grad = None
        with unguarded():
            for index in indices:
                self.params[index].grad = self.shown[index] = None


def _cut_out(buffer: Tensor, cut: BufferCut) -> list[Tensor]:
    pieces = torch.split_with_sizes(buffer, cut.sizes)
    return [pieces[place] for place in cut.places]
