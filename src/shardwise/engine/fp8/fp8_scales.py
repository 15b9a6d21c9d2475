"""The scales of weights that are gathered in fp8, on which all ranks agree at the start of each forward.

A rank sees only its slices of a weight, so that each takes the maxima of its own, and one small gather brings those of
all weights together. Rounding is monotonic: the maximum of the bf16 values is the rounded maximum of the masters, so
that the scale is the one that a layer would compute from the whole bf16 weight.
"""

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import own_slice
from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core import Core
from shardwise.engine.fp8.casts import E4M3, scale_of
from shardwise.engine.fp8.fp8_bytes import Fp8Bytes
from shardwise.program import Kind
from shardwise.program.spec import ROOT

# In float32 elements.
_INVERSE_STRIDE = 4

_NAME = CollectiveName(f"{Kind.GATHER_SCALES.value} {ROOT}")


class Fp8Scales:
    """The scales of all weights of a model that are gathered in fp8. The core's executor refreshes them.

    stale      values were written since the scales were last refreshed
    inverses   name of a weight → the inverse of its scale, always in the same memory
    """

    def __init__(self, core: Core) -> None:
        setting = self._setting = core.setting
        self._core, self._group, self._collectives = core, setting.groups.gather, setting.collectives
        self.cover()
        setting.events.values_written.append(self._spoil)
        core.executor.scale_by(self)

    def buffers(self) -> list[tuple[list[str], Fp8Bytes]]:
        """Return the buffers with such weights, and the names of their parameters."""
        return [(flat.names, flat.full.narrow) for flat in self._core.flats if isinstance(flat.full.narrow, Fp8Bytes)]

    def cover(self) -> None:
        """Have a scale for each of the weights that the units hold now."""
        self.stale = True
        self.inverses: dict[str, Tensor] = {}
        buffers, device = self.buffers(), self._setting.device
        weights = [(names[index], fp8, index) for names, fp8 in buffers for index in fp8.weights]
        self._num_weights = len(weights)
        if not weights:
            return
        numbers = {(id(fp8), index): number for number, (_, fp8, index) in enumerate(weights)}
        self._maxima = torch.zeros(self._group.size * len(weights), device=device)
        # NaN until they are known: a forward that came before would not go unnoticed.
        self._scales = torch.full((len(weights),), torch.nan, device=device)
        # Products in fp8 need the address of a scale to be a multiple of 16 bytes.
        padded = torch.full((len(weights), _INVERSE_STRIDE), torch.nan, device=device)
        self._inverses = padded[:, 0]
        self._parts: list[Tensor] = []
        owners: list[int] = []
        for name, fp8, index in weights:
            number = numbers[id(fp8), index]
            fp8.scales[index] = self._scales[number]
            # As `data`: autograd saves it, and writing the same value again is no change.
            self.inverses[name] = self._inverses[number].data
        for _, fp8 in buffers:
            for index, part in fp8.owned:
                self._parts.append(part)
                owners.append(numbers[id(fp8), index])
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)

    def _spoil(self) -> None:
        self.stale = True

    def refresh(self, *, is_local: bool) -> None:
        """Take the maxima of the masters on all ranks; `is_local`: there is only one. Collective."""
        self._take_maxima()
        if not is_local:
            self._group.log.name = _NAME
            self._collectives.all_gather(self._maxima, group=self._group).wait()
        self._rescale()

    @torch.no_grad()
    def _take_maxima(self) -> None:
        own = own_slice(self._maxima, group=self._group)
        own.zero_()
        if self._parts:
            maxima = torch.stack(torch._foreach_norm(self._parts, torch.inf))
            own.index_copy_(0, self._owners, maxima.to(own.device, own.dtype, non_blocking=True))

    @torch.no_grad()
    def _rescale(self) -> None:
        largest = self._maxima.view(self._group.size, self._num_weights).amax(dim=0)
        scales, inverses = scale_of(largest.to(torch.bfloat16).to(torch.float32), dtype=E4M3)
        self._scales.copy_(scales)
        self._inverses.copy_(inverses)
        self.stale = False
        self._setting.tape.record(Kind.GATHER_SCALES, ROOT, lambda: self._scales.nbytes)
