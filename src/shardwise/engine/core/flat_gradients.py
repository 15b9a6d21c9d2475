"""The gradients of a unit's parameters of one dtype: taken from autograd, averaged elsewhere, given to their owners.

Autograd leaves a rank's own gradients in `p.grad`; they are taken from there, and averages over all ranks come back.
The owned parts, which the optimizer steps, get theirs. Where averages are whole, `p.grad` shows them, in the master's
dtype.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from shardwise.base.vocabulary.layout import BufferCut, cut_out
from shardwise.engine.core.full_buffer import FullBuffer, cut_pieces
from shardwise.engine.core.master import Master, Owned
from shardwise.engine.core.parameters import set_grad, unguarded
from shardwise.plan.placement import Placement


class Gradients:
    """What happens to the gradients of a flat's parameters.

    shows       `p.grad` of the module's parameters is the averaged gradient
    hidden      the averages that `p.grad` showed before this backward, which are to be added to
    awaits      a backward runs, and no average of it has come
    begun       an average of which pieces have brought a part
    """

    def __init__(self, params: list[nn.Parameter], *, full: FullBuffer, master: Master, placement: Placement) -> None:
        self._params, self._full, self._master = params, full, master
        self.shows = not placement.grads.is_sharded
        # The elements of a flat that this rank owns, and their place in an average; None: all of that.
        self._stepped, averaged = full.part(placement.optim), full.part(placement.grads)
        self._own: slice | None = None
        if averaged != self._stepped:
            self._own = slice(self._stepped.start - averaged.start, self._stepped.stop - averaged.start)
        # The parts of this rank's slice; None: it owns everything.
        self._owned_cut: BufferCut | None = None
        if placement.optim.is_sharded:
            self._owned_cut = cut_out(
                [(p.start, p.stop) for p in master.owned], end=self._stepped.stop - self._stepped.start
            )
        self.hidden: list[Tensor | None] = [None] * len(params)
        self.awaits = False
        # Autograd's gradients, until the last piece has copied its part of them.
        self._rows: list[Tensor | None] | None = None
        # Gradients that came past autograd, by the parameters' numbers, in the order in which they came.
        self._handed: list[Mapping[int, Tensor]] = []
        self.begun: Tensor | None = None
        # The averaged gradients that `p.grad` was given, where the owned part's are views of them.
        self._shown: list[Tensor | None] = [None] * len(params)
        # The buffers of averages that `p.grad` may show.
        self._averages: list[weakref.ref[Tensor]] = []
        # The parameters whose gradients this backward alone has made.
        self._new: set[int] = set()
        # The parameters that have reduced gradients, on this rank or on others, where `p.grad` does not show them.
        self._reduced: set[int] = set()

    def has(self, index: int) -> bool:
        """Return whether a parameter has a reduced gradient. All ranks return the same, whatever each holds of it."""
        if not self.shows:
            return index in self._reduced
        with unguarded():
            return self._params[index].grad is not None

    def is_stepped(self, index: int) -> bool:
        """Return whether an update changes a parameter's slices, also by zeros that were left as its gradient.

        All ranks return the same.
        """
        return index in self._reduced

    # This rank's own, and the averages of before

    def hide(self) -> None:
        """Before backward: autograd must find no gradient, or it would add this rank's own to the average."""
        grads = self._taken_off()
        if self.shows:
            self.hidden = grads
        self._handed = []
        self.awaits = True

    def hand(self, gradients: Mapping[int, Tensor]) -> None:
        """Hold gradients that come past autograd, which is to bring none of the same use of these parameters."""
        self._handed.append(gradients)

    def take_off(self) -> list[Tensor | None]:
        """Return this rank's gradients, which autograd has left at the parameters or which were handed over."""
        given = self._taken_off()
        for gradients in self._handed:
            for index, gradient in gradients.items():
                other = given[index]
                # As autograd adds up what several uses of a parameter bring.
                given[index] = gradient if other is None else other + gradient
        return given

    def _taken_off(self) -> list[Tensor | None]:
        with unguarded():
            given = [parameter.grad for parameter in self._params]
            for parameter, grad in zip(self._params, given, strict=True):
                if grad is not None:
                    parameter.grad = None
        return given

    def release_handed(self) -> None:
        """Note that what `take_off` has returned was copied."""
        self._handed.clear()

    def take_rows(self, *, is_last: bool) -> list[Tensor | None]:
        """Return this rank's gradients, each as one row; the first piece takes them off the parameters."""
        rows = self._rows
        if rows is None:
            given = self.take_off()
            rows = [
                None if grad is None else (grad.to_dense() if grad.is_sparse else grad).reshape(-1) for grad in given
            ]
        self._rows = None if is_last else rows
        return rows

    def rows(self) -> list[Tensor]:
        """Return autograd's gradients that pieces have not copied yet."""
        return [row for row in self._rows or () if row is not None]

    def begin(self, average: Tensor) -> None:
        """Keep an average, to which other pieces bring their part."""
        self.begun = average

    def drop_pieces(self) -> None:
        """Forget what pieces have yet to take, and what they have brought."""
        self._rows = self.begun = None
        self._handed = []

    def restore(self) -> None:
        """Restore earlier averages where backward brought none: what autograd left is this rank's own."""
        if not self.awaits:
            return
        with unguarded():
            for parameter, average in zip(self._params, self.hidden, strict=True):
                parameter.grad = average
        self.awaits = False

    def undo(self) -> None:
        """Restore the gradients from before a backward that raised."""
        if not self.awaits:
            self.drop(set(self._new))
        self.restore()

    @property
    def can_undo(self) -> bool:
        """Return whether the running backward has added nothing to gradients from before it."""
        owned = self._master.owned
        return self.awaits or not any(part.index not in self._new for part in owned if part.parameter.grad is not None)

    # Averages

    def add(self, average: Tensor, *, views: list[Tensor] | None = None) -> None:
        """Take this backward's averaged gradients, on top of those that are there: of the slice, or of everything.

        `views`: the parameters' places in it, if they are made already.
        """
        olds: list[Tensor] = []
        news: list[Tensor] = []
        self.awaits, self.begun = False, None
        self._new.clear()
        whole = (views or self._full.views_of(average)) if self.shows else []
        if self.shows:
            self._note_average(average)
            # The owned parts' gradients are views of the same memory.
            for index, (parameter, view) in enumerate(zip(self._params, whole, strict=True)):
                old = self.hidden[index]
                if old is not None:
                    olds.append(old)
                    news.append(view)
                else:
                    self._new.add(index)
                # What was frozen since keeps the gradient that it had, as in one process.
                shown = old if old is not None else view if parameter.requires_grad else None
                parameter.grad = shown
                if self._master.is_separate:
                    self._shown[index] = shown
        if self._master.is_separate:
            grads = whole if self._owned_cut is None else self._owned_grads(average, self._owned_cut)
            self._add_owned(grads, olds=olds, news=news)
        if olds:
            if self._master.host is not None:
                self._master.host.land()
            torch._foreach_add_(olds, news)

    def _add_owned(self, grads: Sequence[Tensor], *, olds: list[Tensor], news: list[Tensor]) -> None:
        """Give the owned parts their gradients; those to be added to existing ones go to `olds` and `news`."""
        with unguarded():
            trained = {index for index, parameter in enumerate(self._params) if parameter.requires_grad}
        if not self.shows:
            self._new |= trained - self._reduced
        self._reduced |= trained
        on_device = self._master.host is None
        for part, new in zip(self._master.owned, grads, strict=True):
            parameter = part.parameter
            if part.index not in trained:
                continue
            old = parameter.grad
            if old is None:
                if on_device:
                    parameter.grad = new
                else:
                    set_grad(parameter, new)
                self._new.add(part.index)
            elif not self.shows:
                olds.append(old)
                news.append(new)

    def _note_average(self, average: Tensor) -> None:
        """Note a buffer once, since it may be the same one in every step."""
        base = average if average._base is None else average._base
        others = [held for held in self._averages if held() is not None and held() is not base]
        self._averages = [*others, weakref.ref(base)]

    def _owned_grads(self, average: Tensor, cut: BufferCut) -> Sequence[Tensor]:
        """Return the owned parts' views of what this rank steps, which is cut out of the average first."""
        mine = average if self._own is None else average[self._own]
        host = self._master.host
        if host is not None and not host.keeps_grads:
            mine = host.fetch(mine)
        return cut_pieces(mine, cut)

    def take_over(self, average: Tensor, *, indices: Collection[int]) -> None:
        """Averages that are there already, of these parameters: of the slice, or of everything (another plan's)."""
        self.add(average)
        self.drop(set(range(len(self._params))) - set(indices))
        self._new.clear()

    # What `p.grad` of the module shows

    def shows_average(self, index: int) -> bool:
        """Return whether `p.grad` is an average over all ranks, unless other code has replaced it."""
        grad = self._params[index].grad
        if grad is None:
            return False
        base = grad if grad._base is None else grad._base
        return any(held() is base for held in self._averages)

    def follow_shown(self) -> None:
        """Before an update: where `p.grad` was replaced, the owned part's gradient is cut out of the new one."""
        with unguarded():
            for part in self._master.owned:
                grad = self._params[part.index].grad
                if grad is not self._shown[part.index]:
                    self._follow_shown(part, grad)

    def _follow_shown(self, part: Owned, grad: Tensor | None) -> None:
        if grad is not None:
            start = self._stepped.start + part.start - self._full.layout.offsets[part.index]
            mine = grad.to(self._master.unsettled.dtype).reshape(-1)[start : start + part.stop - part.start]
            set_grad(part.parameter, mine.view_as(part.parameter))
        else:
            part.parameter.grad = None
        self._shown[part.index] = grad

    # Gradients that are cleared

    def drop_stale(self) -> None:
        """Before forward: a gradient that was cleared in the optimizer is cleared in the model, and the reverse."""
        if not self.shows or not self._master.is_separate:
            # There are none to be seen, or the model's parameters are the optimizer's.
            return
        for part in self._master.owned:
            if self._params[part.index].grad is None:
                part.parameter.grad = None
            elif part.parameter.grad is None:
                self._params[part.index].grad = None
        if not self._master.has_grads:
            # Also what this rank does not own a part of.
            for parameter in self._params:
                parameter.grad = None

    def clear(self, indices: AbstractSet[int], *, drop: bool) -> None:
        """Somebody clears the gradients of these parameters; with `drop`, also those that are reduced."""
        if drop:
            self.drop(indices)
        # Of these nothing is left that was there before.
        self._new |= indices

    def drop_new(self, index: int) -> None:
        """Take back a gradient that this backward alone has made: no rank used the parameter."""
        if index in self._new:
            self.drop({index})

    def drop(self, indices: Collection[int]) -> None:
        """Forget the gradients of these parameters."""
        if len(indices) == len(self._params):
            self.drop_all()
            return
        self._reduced.difference_update(indices)
        with unguarded():
            for part in self._master.owned:
                if part.index in indices:
                    # It may be the parameter itself, at rest, which would come back here.
                    part.parameter.grad = None
            for index in indices:
                self._params[index].grad = self._shown[index] = None

    def drop_all(self) -> None:
        """Drop gradients that an optimizer has cleared, as after every step."""
        self._reduced.clear()
        self._shown = [None] * len(self._params)
        with unguarded():
            for part in self._master.owned:
                part.parameter.grad = None
            for parameter in self._params:
                parameter.grad = None

    def discard(self) -> None:
        """Give up all of them, also those of a backward that never runs."""
        self.awaits = False
        self.drop_all()
        self.hidden = [None] * len(self._params)
