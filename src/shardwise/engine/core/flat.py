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

from shardwise.comm.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat_gradients import Gradients
from shardwise.engine.core.full_buffer import FullBuffer
from shardwise.engine.core.host_states import HostMemory
from shardwise.engine.core.master import Master
from shardwise.engine.core.precision import torch_dtype
from shardwise.engine.fp8.fp8_bytes import Fp8Bytes
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program.buffers import FlatSpec
from shardwise.vocabulary.layout import ALIGNMENT

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
        self.block = setting.alignment if setting.alignment > ALIGNMENT and placement.optim is SHARDED else 1
        self.layout = spec.layout(num_slices=self.groups.gather.size, alignment=setting.alignment)
        sharded = placement.params is SHARDED
        fp8 = None
        if spec.num_fp8 and sharded:
            fp8 = Fp8Bytes(self.layout, num_fp8=spec.num_fp8, dtype=self.compute_dtype)
        dtype, group = self.compute_dtype, self.groups.gather
        self.full = FullBuffer(self.layout, dtype=dtype, sharded=sharded, device=self.device, group=group, fp8=fp8)
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
        optim_sharded, full = self.placement.optim is SHARDED, self.full.buffer
        size = self.layout.slice_elements if optim_sharded else self.layout.num_elements
        aliased = host is None and not self.full.sharded and self.compute_dtype == self.master_dtype
        staged = None
        if host is not None:
            values = host.zeros(size, dtype=self.master_dtype)
            if self.compute_dtype != self.master_dtype:
                staged = host.zeros(size, dtype=self.compute_dtype)
        elif not aliased:
            values = torch.zeros(size, dtype=self.master_dtype, device=self.device)
        else:
            # As `data`: what a gather writes into the full buffer does not count as a write into the slice.
            values = self.full.slice_of(full).data if optim_sharded else full
        master = Master(values, staged=staged, aliased=aliased, is_separate=values is not full, host=host)
        if optim_sharded:
            parts = self.layout.owned(self.groups.gather.index)
        else:
            parts = [(index, offset, offset + size) for index, (offset, size) in enumerate(self.layout.sizes())]
        master.own(self.params, parts, in_shape=not optim_sharded)
        return master

    def lay_out(self) -> None:
        """Make the full buffer and the parameters' places in it; where parameters are sharded, its memory goes again.

        Of several buffers, once the masters of all are there: one that came later would come to lie in that memory,
        which could then not be given back.
        """
        if self.full.views:
            return
        self.full.lay_out()
        if self.full.fp8 is not None:
            parts = [(part.index, part.start, part.stop) for part in self.master.owned]
            self.full.fp8.own(parts, own_full=self.full.own, staged=self.master.staged)
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
        self.master.writes.before_own()
        flat = value.detach().reshape(-1)
        offset, size = self.layout.offsets[index], prod(self.layout.shapes[index])
        if self.placement.optim is SHARDED:
            first = self.full.first
            start, stop = max(offset, first), min(offset + size, first + self.layout.slice_elements)
            if start < stop:
                self.master.values[start - first : stop - first].copy_(flat[start - offset : stop - offset])
        else:
            self.master.values[offset : offset + size].copy_(flat)
        if not self.full.sharded:
            self.full.buffer[offset : offset + size].copy_(flat)
        self.master.writes.after_own()

    @torch.no_grad()
    def take_over(self) -> None:
        """Values that were written into the module's parameters into the master, which keeps its digits elsewhere."""
        self.full.wait()
        self.master.writes.before_own()
        full, values = self.full.buffer, self.master.values
        if self.placement.optim is SHARDED:
            full = self.full.slice_of(full)
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
        return self.placement.optim is not SHARDED or self.master.aliased or self.layout.num_slices == 1

    @torch.no_grad()
    def full_master(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of the master; cast first, so that no more is sent than is asked for. Collective unless `holds_all`."""
        wanted = dtype or self.master_dtype
        if self.placement.optim is not SHARDED:
            return self.master.values.to(wanted, copy=True)
        if self.master.aliased:
            self.full.wait()
            return self.full.buffer.to(wanted, copy=True)
        return self.whole_of(self.master.values, dtype=wanted)

    @torch.no_grad()
    def whole_of(self, mine: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """All of what `mine` is this rank's part of, as the master is; itself, where that is all. Else collective."""
        if self.placement.optim is not SHARDED:
            return mine
        if self.layout.num_slices == 1:
            return mine.to(self.device, dtype or mine.dtype, copy=True)
        whole = torch.zeros(self.layout.num_elements, dtype=dtype or mine.dtype, device=self.device)
        self.full.slice_of(whole).copy_(mine)
        self.groups.gather.log.name = FOR_STATE
        self.collectives.all_gather(whole, group=self.groups.gather).wait()
        return whole

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
