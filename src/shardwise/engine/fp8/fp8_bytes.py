"""The full buffer of weights that are gathered in fp8: bytes, in which other parameters of the unit lie as well.

A weight is cast from the master through its bf16 value, as a layer that is given the bf16 weight casts it. So gathering
in fp8 changes no result, only the bytes that are sent.

The module's parameter keeps its shape and dtype, but no memory of its own: autograd brings its gradient, and
its layer computes with the bytes (engine/fp8/linear.py). If other code reads it while its unit computes, it is NaN.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardwise.base.vocabulary.layout import Layout
from shardwise.engine.fp8.casts import E4M3


class Fp8Bytes:
    """The bytes of one flat buffer.

    weights   index of a parameter → its fp8 values, which are there while the buffer is
    scales    index of a parameter → the scale by which it is cast, given by `Fp8Scales`
    """

    def __init__(self, layout: Layout, *, num_fp8: int, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self.first = len(layout.shapes) - num_fp8
        self.weights: dict[int, Tensor] = {}
        self.scales: dict[int, Tensor] = {}
        self.owned: list[tuple[int, Tensor]] = []
        self._targets: list[Tensor] = []
        self._others: tuple[list[Tensor], list[Tensor]] = ([], [])

    def lay_out(self, full: Tensor) -> list[Tensor]:
        """Return what the parameters are views of, in the order of the layout."""
        nothing = torch.full((), torch.nan, dtype=self._dtype, device=full.device)
        views = []
        for index, (offset, size) in enumerate(self._layout.sizes()):
            shape = self._layout.shapes[index]
            if index < self.first:
                views.append(full[offset : offset + size * self._dtype.itemsize].view(self._dtype).view(shape))
                continue
            # As `data`: autograd saves it, and gathering it again is no change.
            self.weights[index] = full[offset : offset + size].view(E4M3).view(shape).data
            views.append(nothing.expand(shape))
        return views

    def own(self, parts: Sequence[tuple[int, int, int]], *, own_full: Tensor, staged: Tensor) -> None:
        """Note what this rank owns: (parameter, start, stop) in its slice of the masters, which `staged` holds."""
        for index, start, stop in parts:
            value = staged[start:stop]
            if index < self.first:
                # It lies in one slice, with room for its wider elements.
                assert stop - start == prod(self._layout.shapes[index])
                target = own_full[start : start + (stop - start) * self._dtype.itemsize].view(self._dtype)
                self._others[0].append(target)
                self._others[1].append(value)
            else:
                self._targets.append(own_full[start:stop].view(E4M3))
                self.owned.append((index, value))

    @torch.no_grad()
    def load_own(self) -> None:
        """Cast what this rank owns into its place."""
        targets, values = self._others
        if targets:
            torch._foreach_copy_(targets, values, non_blocking=True)
        for target, (index, value) in zip(self._targets, self.owned, strict=True):
            # A power of two changes no digit of a bf16 value.
            target.copy_(value.to(target.device, self._dtype, non_blocking=True) * self.scales[index])
