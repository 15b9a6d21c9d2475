"""Parameters of one unit and one dtype, which lie end to end: a full buffer, a master and gradients.

full     what modules compute with (full_buffer.py)
master   what the optimizer steps (master.py)
grads    what backward brings, and the averages over all ranks (flat_gradients.py)

Each changes its own attributes. What concerns two of them is here.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import prod

import torch
from torch import Tensor, nn

from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.comm.groups.collectives import own_slice
from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat_gradients import Gradients
from shardwise.engine.core.full_buffer import FullBuffer
from shardwise.engine.core.guests import HostMemory
from shardwise.engine.core.master import Master
from shardwise.engine.core.precision import torch_dtype
from shardwise.plan.placement import Placement
from shardwise.program.buffers import FlatSpec

FOR_STATE = CollectiveName("gather for a state dict")


class FlatParams:
    """All of them are frozen at first, or all trained.

    block   the size of the blocks that an optimizer works on, between which slices are cut; 1 without blocks
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        spec: FlatSpec,
        placement: Placement,
        setting: CoreSetting,
        host: HostMemory | None,
    ) -> None:
        self.params = params
        self.describe(spec)
        self.placement = placement
        self.device, self.groups, self.collectives = setting.device, setting.groups, setting.collectives
        self.compute_dtype, self.master_dtype = torch_dtype(spec.compute_dtype), torch_dtype(spec.master_dtype)
        self.block = setting.alignment if setting.alignment > ALIGNMENT and placement.optim.is_sharded else 1
        axes = self.groups.gather.size * (self.groups.replicate.size if placement.optim.is_sharded_across else 1)
        self.layout = spec.layout(num_slices=axes, alignment=setting.alignment)
        sharded = placement.params.is_sharded
        narrow = None
        if spec.num_fp8 and sharded:
            assert setting.narrow is not None, "the plan gathers weights in fp8"
            narrow = setting.narrow(self.layout, num_fp8=spec.num_fp8, dtype=self.compute_dtype)
        dtype, place = self.compute_dtype, self.device
        self.full = FullBuffer(
            self.layout, dtype=dtype, sharded=sharded, device=place, groups=self.groups, narrow=narrow
        )
        if not sharded:
            self.full.lay_out()
        self.master = self._make_master(host)
        self.grads = Gradients(params, full=self.full, master=self.master, placement=placement)

    @property
    def stepped_on(self) -> torch.device:
        """The device that computes the update."""
        on_device = self.master.host is None or self.master.host.keeps_grads
        return self.device if on_device else self.master.unsettled.device

    def describe(self, spec: FlatSpec) -> None:
        """Take a spec of the same parameters: their names may have changed."""
        self.spec = spec
        self.names = [param.name for param in spec.params]

    def _make_master(self, host: HostMemory | None) -> Master:
        optim, full = self.placement.optim, self.full.buffer
        owned, sent = self.full.part(optim), self.full.part(self.placement.params)
        size, staged, place = owned.stop - owned.start, None, None
        aliased = host is None and not self.full.sharded and self.compute_dtype == self.master_dtype
        if host is not None:
            values = host.zeros(size, dtype=self.master_dtype)
            if self.compute_dtype != self.master_dtype:
                staged = host.zeros(size, dtype=self.compute_dtype)
        elif optim.is_sharded_across:
            staged = torch.zeros(sent.stop - sent.start, dtype=self.compute_dtype, device=self.device)
            # As `data`: what a gather writes into the slice does not count as a write into a part of it.
            place = staged[owned.start - sent.start : owned.stop - sent.start].data
            is_part = self.compute_dtype == self.master_dtype
            values = place if is_part else torch.zeros(size, dtype=self.master_dtype, device=self.device)
        elif not aliased:
            values = torch.zeros(size, dtype=self.master_dtype, device=self.device)
        else:
            # As `data`, for the same reason.
            values = full[owned].data if optim.is_sharded else full
        master = Master(values, staged=staged, place=place, aliased=aliased, is_separate=values is not full, host=host)
        if optim.is_sharded:
            parts = self.layout.within(owned)
        else:
            parts = [(index, offset, offset + size) for index, (offset, size) in enumerate(self.layout.sizes())]
        master.own(self.params, parts, in_shape=not optim.is_sharded)
        return master

    def lay_out(self) -> None:
        """Make the full buffer and the parameters' places in it; where parameters are sharded, its memory goes again.

        Of several buffers, once the masters of all are there: one that came later would come to lie in that memory,
        which could then not be given back.
        """
        if self.full.views:
            return
        self.full.lay_out()
        if self.full.narrow is not None:
            parts = self.layout.within(self.full.part(self.placement.params))
            self.full.narrow.own(parts, own_full=self.full.own, staged=self.master.staged)
        self.full.free()

    def attach(self, index: int, parameter: nn.Parameter) -> None:
        """Make the module's parameter, which may be a new one where it was on the meta device, a view of the buffer."""
        parameter.data = self.full.views[index]
        if self.compute_dtype != self.master_dtype:
            # Averaged gradients are of the master's dtype.
            parameter.grad_dtype = None
        self.params[index] = parameter
        self.master.step_instead(index, parameter)

    def indices_of(self, names: AbstractSet[str]) -> AbstractSet[int]:
        """Return the indices of the parameters with these names."""
        return {index for index, name in enumerate(self.names) if name in names}

    # Values that others write

    @torch.no_grad()
    def fill(self, index: int, value: Tensor) -> None:
        """Take the values of one parameter, given whole, into the master (and what is whole of the full buffer)."""
        self.master.wait()
        self.master.writes.before_own()
        flat = value.detach().reshape(-1)
        offset, size = self.layout.offsets[index], prod(self.layout.shapes[index])
        held = [(self.master.values, self.placement.optim)]
        if self.placement.optim.is_sharded_across:
            held.append((self.master.staged, self.placement.params))
        for values, where in held:
            part = self.full.part(where)
            start, stop = max(offset, part.start), min(offset + size, part.stop)
            if start < stop:
                values[start - part.start : stop - part.start].copy_(flat[start - offset : stop - offset])
        if not self.full.sharded:
            self.full.buffer[offset : offset + size].copy_(flat)
        self.master.writes.after_own()

    @torch.no_grad()
    def take_over(self) -> None:
        """Values that were written into the module's parameters into the master, which keeps its digits elsewhere."""
        self.full.wait()
        self.master.writes.before_own()
        full, values = self.full.buffer[self.full.part(self.placement.optim)], self.master.values
        master = values.to(self.device)
        values.copy_(torch.where(full != master.to(full.dtype), full.to(master.dtype), master))
        self.master.stage()
        self.master.writes.after_own()

    @torch.no_grad()
    def write_master(self, values: Tensor) -> None:
        """Write all of the master."""
        self.master.writes.before_own()
        self.master.values.copy_(values)
        self.master.writes.after_own()

    def lend_master(self) -> None:
        """Somebody gets at the master's memory in a way that torch does not count."""
        self.full.wait()
        self.master.settle()
        self.master.writes.lend()

    # All of the master

    @property
    def holds_all(self) -> bool:
        """Return whether this rank has all of the master, here or in the full buffer."""
        return not self.placement.optim.is_sharded or self.master.aliased or self.layout.num_slices == 1

    @torch.no_grad()
    def full_master(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of the master; cast first, so that no more is sent than is asked for. Collective unless `holds_all`."""
        wanted = dtype or self.master_dtype
        if not self.placement.optim.is_sharded:
            return self.master.values.to(wanted, copy=True)
        if self.master.aliased:
            self.full.wait()
            return self.full.buffer.to(wanted, copy=True)
        return self.whole_of(self.master.values, dtype=wanted)

    @torch.no_grad()
    def whole_of(self, mine: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of what `mine` is this rank's part of, as the master is; itself, where that is all. Else collective."""
        if not self.placement.optim.is_sharded:
            return mine
        if self.layout.num_slices == 1:
            return mine.to(self.device, dtype or mine.dtype, copy=True)
        whole = torch.zeros(self.layout.num_elements, dtype=dtype or mine.dtype, device=self.device)
        whole[self.full.part(self.placement.optim)] = mine.to(self.device)
        self.gather_parts(whole)
        return whole

    def gather_parts(self, whole: Tensor) -> None:
        """Gather a buffer of which each rank holds its part, as of the master. Collective."""
        groups = [self.groups.gather]
        if self.placement.optim.is_sharded_across:
            groups.insert(0, self.groups.replicate)
        for group in groups:
            sent = whole if group is self.groups.gather else own_slice(whole, group=self.groups.gather)
            if group.size > 1:
                group.log.name = FOR_STATE
                self.collectives.all_gather(sent, group=group).wait()

    def discard(self) -> None:
        """Give the memory back: the parameters lie in other buffers now."""
        self.grads.discard()
        self.master.discard()
        self.full.discard()


@torch.no_grad()
def refresh(flats: Sequence[FlatParams]) -> None:
    """Cast updated unsharded masters into the full buffers, all in one call."""
    copied = [flat for flat in flats if not flat.master.aliased]
    if copied:
        torch._foreach_copy_([flat.full.buffer for flat in copied], [flat.master.values for flat in copied])
