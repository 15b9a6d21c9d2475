"""Values that were written outside of an update: into a module's parameters, or into the slices of an optimizer.

A value may be stored twice: in the full buffer, in the dtype that modules compute in, and in the master that the
optimizer steps. After a write to one of them, the other is updated before it is read:

written                    params replicated                         params sharded
module's parameters        copied into the master                    refused when they are read (guard.py)
slices, optim replicated   cast into the full buffer                 -
slices, optim sharded      refused: other ranks have the old ones,   the next gather includes it
                           unless written inside shardwise.edit

Where both are the same memory there is nothing to do.

torch counts the writes to a tensor (`_version`), and the views of a buffer share one count. Writes through `p.data` are
not counted, so between two updates slices have a class that intercepts `p.data` (the counts: core/master_writes.py).

Without it one copy keeps the old values: a write is undone by the next update, or each rank trains with its own, with
no error. Since f392c2b2.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals import torch_private
from shardwise.engine.core.flat import FlatParams, refresh
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.guards.guard import GuardClasses, wake

# torch's own property, which `Slice.data` hides.
_DATA = torch_private.tensor_data


class Slice(nn.Parameter):
    """A slice that an optimizer steps, between two updates: `p.data` is noticed, and cannot be replaced.

    During an update it is of its own class: torch's optimizers choose their fast implementations by exact class.
    """

    _own_class = nn.Parameter
    _lend: Callable[[], None]

    @property
    def data(self) -> Tensor:
        self._lend()
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise InvalidModel(
            "p.data = … of a slice in optimizer.param_groups takes it out of the model's memory: write into it "
            "(p.copy_(…)) inside `with shardwise.edit(model):`"
        )


_SLICES = GuardClasses(Slice)


class Writes:
    """Finds writes to a model's parameters and slices, and updates the other copies."""

    def __init__(self, flats: Sequence[FlatParams]) -> None:
        replicated = [flat for flat in flats if not flat.placement.params.is_sharded]
        # Buffers whose module's parameters are copies of the master.
        self._copied = [flat for flat in replicated if not flat.master.aliased]
        self._params = [parameter for flat in self._copied for parameter in flat.params]
        cut = [flat for flat in flats if flat.master.is_separate]
        self._slices = [part.parameter for flat in cut for part in flat.master.owned]
        # Buffers whose slices have copies: in the full buffer, here or on other ranks, or staged.
        self._sliced = [flat for flat in cut if not _is_home(flat) or flat.master.is_staged]
        # Buffers whose slices' gradients are views of the gradients that the module's parameters show.
        self._shown = [flat for flat in cut if flat.grads.shows]
        for flat in cut:
            # Without copies there is nothing to update: the next gather includes the write.
            lend = flat.lend_master if flat in self._sliced else (lambda: None)
            for part in flat.master.owned:
                part.parameter._lend = lend  # type: ignore[attr-defined]
        self.settled()

    def settled(self) -> None:
        """Begin to look for writes: those up to now were the engine's."""
        self._counts = self._count()
        for flat in self._sliced:
            flat.master.writes.settled()
        for parameter in self._slices:
            parameter.__class__ = _SLICES[type(parameter)]

    def release(self) -> None:
        """Stop looking for writes: the parameters are in other buffers now."""
        self._copied, self._params, self._slices, self._sliced, self._shown = [], [], [], [], []
        self.settled()

    def before_step(self) -> None:
        """Copy values written into the module's parameters into the masters; those in slices are settled later."""
        self._take_over(but=())
        wake(self._slices)

    def follow_grads(self) -> None:
        """Update the slices' gradients where `p.grad` of the module was replaced."""
        for flat in self._shown:
            flat.grads.follow_shown()

    def settle(self, *, announced: bool = False) -> None:
        """Update all copies of written values before they are read, or refuse the write.

        With `announced`, all ranks have written (shardwise.edit), and the slices are gathered next.
        """
        slices = [flat for flat in self._sliced if flat.master.writes.found]
        if not self._take_over(but=slices) and not slices:
            return
        for flat in slices:
            if _is_home(flat):
                flat.master.stage()
            elif not flat.placement.optim.is_sharded:
                refresh([flat])
            elif not announced:
                raise InvalidModel(
                    f"slices in optimizer.param_groups (of {flat.names[0]} or a neighbour) were written outside of "
                    "optimizer.step(), and other ranks have the old values: write on every rank, inside "
                    "`with shardwise.edit(model):`"
                )
        self.settled()

    def _count(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self._params]

    def _take_over(self, *, but: Sequence[FlatParams]) -> bool:
        """Copy written parameters into their masters; refuse if slices of the same buffer were written as well."""
        counts = self._count()
        if counts == self._counts and not any(flat.master.writes.touched for flat in self._copied):
            return False
        changed = {id(p) for p, now, then in zip(self._params, counts, self._counts, strict=True) if now != then}
        for flat in self._copied:
            if not flat.master.writes.touched and not any(id(parameter) in changed for parameter in flat.params):
                continue
            if any(flat is other for other in but):
                raise InvalidModel(
                    f"{flat.names[0]} or its neighbours were used in the module and written in optimizer.param_groups "
                    "since the last step, so that the newer value is not known: write inside "
                    "`with shardwise.edit(model):`"
                )
            flat.take_over()
        return True


def _is_home(flat: FlatParams) -> bool:
    """Return whether no other rank has a copy of this rank's slice between two gathers of parameters."""
    params, optim = flat.placement.params, flat.placement.optim
    return params.is_sharded and params.axes == optim.axes
