"""The buffers of a unit's parameters, and their gradients.

Autograd leaves a rank's own gradients in `p.grad`; they are taken from there, and averages over all ranks come back.
The owned parts, which the optimizer steps, get theirs. Where averages are whole, `p.grad` shows them, in the master's
dtype.
"""

import weakref
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Collectives, own_slice
from shardwise.comm.groups import MeshGroups
from shardwise.engine.core.flat_buffers import FlatBuffers, Owned, cut_pieces, unguarded
from shardwise.engine.core.host_states import HostMemory
from shardwise.engine.core.shared_grads import SharedGrads
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program.buffers import FlatSpec
from shardwise.torch_internals import torch_private
from shardwise.vocabulary.layout import ALIGNMENT, cut_out


class FlatParams(FlatBuffers):
    """Parameters of one unit and one dtype in one buffer, and what happens to their gradients."""

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
        super().__init__(
            params,
            spec=spec,
            placement=placement,
            device=device,
            groups=groups,
            collectives=collectives,
            alignment=alignment,
            host=host,
        )
        if self.placement.optim is SHARDED:
            self._owned_cut = cut_out([(p.start, p.stop) for p in self.owned], end=self.layout.slice_elements)
        self._every = frozenset(range(len(self.params)))
        # The averaged gradients that `p.grad` showed before this backward, which are to be added to.
        self.hidden: list[Tensor | None] = [None] * len(self.params)
        self.awaits_grads = False
        self.shared = SharedGrads()
        # The averaged gradients that `p.grad` was given, where the owned part's are views of them.
        self.shown: list[Tensor | None] = [None] * len(self.params)
        # The buffers of averages that `p.grad` may show.
        self._averages: list[weakref.ref[Tensor]] = []
        # The parameters whose gradients this backward alone has made.
        self.with_new_grads: set[int] = set()
        # The parameters that have reduced gradients, on this rank or on others, where `p.grad` does not show them.
        self._reduced: set[int] = set()
        # Whether `p.grad` of the module's parameters is the averaged gradient.
        self.shows_grads = self.placement.grads is not SHARDED

    def indices_of(self, names: AbstractSet[str]) -> AbstractSet[int]:
        """Return the indices of the parameters with these names; of all of them where the whole model is meant."""
        if all(map(names.__contains__, self.names)):
            return self._every
        return {index for index, name in enumerate(self.names) if name in names}

    def has_grad(self, index: int) -> bool:
        """Return whether a parameter has a reduced gradient. All ranks return the same, whatever each holds of it."""
        if not self.shows_grads:
            return index in self._reduced
        with unguarded():
            return self.params[index].grad is not None

    def is_stepped(self, index: int) -> bool:
        """Return whether an update changes a parameter's slices, also by zeros that were left as its gradient.

        All ranks return the same.
        """
        return index in self._reduced

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
        whole = [] if self.placement.grads is SHARDED else views or self.views(average)
        if self.shows_grads:
            self._note_average(average)
            # The owned parts' gradients are views of the same memory.
            for index, (parameter, view) in enumerate(zip(self.params, whole, strict=True)):
                old = self.hidden[index]
                if old is not None:
                    olds.append(old)
                    news.append(view)
                else:
                    self.with_new_grads.add(index)
                # What was frozen since keeps the gradient that it had, as in one process.
                shown = old if old is not None else view if parameter.requires_grad else None
                parameter.grad = shown
                if self.is_separate:
                    self.shown[index] = shown
        if self.is_separate:
            grads = self._owned_grads(average) if self.placement.optim is SHARDED else whole
            self._add_owned(grads, olds=olds, news=news)
        if olds:
            if self.host is not None:
                self.host.land()
            torch._foreach_add_(olds, news)

    def _add_owned(self, grads: Sequence[Tensor], *, olds: list[Tensor], news: list[Tensor]) -> None:
        """Give the owned parts their gradients; those to be added to existing ones go to `olds` and `news`."""
        with unguarded():
            frozen = [index for index, parameter in enumerate(self.params) if not parameter.requires_grad]
        trained = self._every.difference(frozen)
        if not self.shows_grads:
            self.with_new_grads |= trained - self._reduced
        self._reduced |= trained
        for part, new in zip(self.owned, grads, strict=True):
            parameter = part.parameter
            if frozen and part.index not in trained:
                continue
            old = parameter.grad
            if old is None:
                set_grad(parameter, new)
                self.with_new_grads.add(part.index)
            elif not self.shows_grads:
                olds.append(old)
                news.append(new)

    def _note_average(self, average: Tensor) -> None:
        """Note a buffer once, since it may be the same one in every step."""
        base = average if average._base is None else average._base
        others = [held for held in self._averages if held() is not None and held() is not base]
        self._averages = [*others, weakref.ref(base)]

    def _owned_grads(self, average: Tensor) -> Sequence[Tensor]:
        """Return the owned parts' views of a slice, which is cut out of the whole buffer first if necessary."""
        mine = average if self.placement.grads is SHARDED else own_slice(average, group=self.groups.gather)
        if self.host is not None and not self.host.keeps_grads:
            mine = self.host.fetch(mine)
        return cut_pieces(mine, self._owned_cut)

    def shows_average(self, index: int) -> bool:
        """Return whether `p.grad` is an average over all ranks, unless other code has replaced it."""
        grad = self.params[index].grad
        if grad is None:
            return False
        base = grad if grad._base is None else grad._base
        return any(held() is base for held in self._averages)

    def hide_grads(self) -> None:
        """Before backward: autograd must find no gradient, or it would add this rank's own to the average."""
        with unguarded():
            grads = [parameter.grad for parameter in self.params]
            for parameter, grad in zip(self.params, grads, strict=True):
                if grad is not None:
                    parameter.grad = None
        if self.shows_grads:
            self.hidden = grads
        self.awaits_grads = True

    def restore_grads(self) -> None:
        """Restore earlier averages where backward brought none: what autograd left is this rank's own."""
        if not self.awaits_grads:
            return
        with unguarded():
            for parameter, average in zip(self.params, self.hidden, strict=True):
                parameter.grad = average
        self.awaits_grads = False

    def undo_grads(self) -> None:
        """Restore the gradients from before a backward that raised."""
        if not self.awaits_grads:
            self.drop_grads(set(self.with_new_grads))
        self.restore_grads()

    @property
    def can_undo_grads(self) -> bool:
        """Return whether the running backward has added nothing to gradients from before it."""
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
            first = self.groups.gather.index * self.layout.slice_elements if self.placement.optim is SHARDED else 0
            start = first + part.start - self.layout.offsets[part.index]
            mine = grad.to(self.master_dtype).reshape(-1)[start : start + part.stop - part.start]
            set_grad(part.parameter, mine.view_as(part.parameter))
        else:
            part.parameter.grad = None
        self.shown[part.index] = grad

    def drop_stale_grads(self) -> None:
        """Before forward: a gradient that was cleared in the optimizer is cleared in the model, and the reverse."""
        if not self.shows_grads or not self.is_separate:
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

    def take_over_grads(self, average: Tensor, *, indices: Collection[int]) -> None:
        """Averages that are there already, of these parameters: of the slice, or of everything (another plan's)."""
        self.add_grads(average)
        self.drop_grads(set(range(len(self.params))) - set(indices))
        self.with_new_grads.clear()

    def discard(self) -> None:
        self.drop_grads(range(len(self.params)))
        self.hidden = [None] * len(self.params)
        super().discard()

    def drop_new_grad(self, index: int) -> None:
        """Take back a gradient that this backward alone has made: no rank used the parameter."""
        if index in self.with_new_grads:
            self.drop_grads({index})

    def drop_grads(self, indices: Collection[int]) -> None:
        """Forget the gradients of these parameters."""
        if len(indices) == len(self.params):
            self._drop_all_grads()
            return
        self._reduced.difference_update(indices)
        with unguarded():
            for part in self.owned:
                if part.index in indices:
                    # It may be the parameter itself, at rest, which would come back here.
                    part.parameter.grad = None
            for index in indices:
                self.params[index].grad = self.shown[index] = None

    def _drop_all_grads(self) -> None:
        """Drop gradients that an optimizer has cleared, as after every step."""
        self._reduced.clear()
        self.shown = [None] * len(self.params)
        with unguarded():
            for part in self.owned:
                part.parameter.grad = None
            for parameter in self.params:
                parameter.grad = None


def set_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    """Set the gradient of a parameter that may live in host memory while its gradients stay on the device.

    torch refuses such a pair, but only where the gradient is set.
    """
    if parameter.device == grad.device:
        parameter.grad = grad
        return
    # Not `parameter.data`, which is guarded (guards/written.py).
    data = torch_private.tensor_data
    there = data.__get__(parameter)
    data.__set__(parameter, grad)
    parameter.grad = grad
    data.__set__(parameter, there)
