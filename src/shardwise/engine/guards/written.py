"""Values that were written outside of an update: into a module's parameters, or into the slices of an optimizer.

A value may lie in two places: in the full buffer, in the dtype that modules compute in, and in the master that the
optimizer steps. What was written into one of them, the other must follow before anybody reads it:

written                  params replicated                         params sharded
module's parameters      the master takes it over                  refused when they are touched (guard.py)
slices, optim whole      cast into the full buffer                 -
slices, optim sharded    refused: other ranks have the old ones,   seen by the next gather
                         unless shardwise.edit tells them

Where both are the same memory there is nothing to do.
"""

from collections.abc import Sequence

from torch import nn

from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.flat_buffers import refresh, unguarded
from shardwise.engine.guards.slice_writes import Slice
from shardwise.errors import InvalidModel
from shardwise.plan.placement import SHARDED


class Writes:
    """The writes to a model's parameters and slices, and how the other copies follow."""

    def __init__(self, flats: Sequence[FlatParams]) -> None:
        replicated = [flat for flat in flats if flat.placement.params is not SHARDED]
        # Whose module's parameters are copies of the master.
        self._copied = [flat for flat in replicated if not flat.aliased]
        self._params = [parameter for flat in self._copied for parameter in flat.params]
        cut = [flat for flat in flats if flat.master is not flat.full]
        self._slices = [part.parameter for flat in cut for part in flat.owned]
        # Of whose slices there are copies: in the full buffer, here or on other ranks, or staged.
        self._sliced = [f for f in cut if f.placement.params is not SHARDED or f.staged is not f.master]
        # Whose slices' gradients are views of the gradients that the module's parameters show.
        self._shown = [flat for flat in cut if flat.shows_grads]
        for flat in cut:
            lend = flat.lend_master if flat in self._sliced else _nothing
            for part in flat.owned:
                part.parameter._lend = lend  # type: ignore[attr-defined]
        self.settled()

    def settled(self) -> None:
        """From here on a write is not the engine's."""
        self._counts = self._count()
        for flat in self._copied:
            flat.touched = False
        for flat in self._sliced:
            flat.writes.settled()
        for parameter in self._slices:
            parameter.__class__ = Slice

    def release(self) -> None:
        """Look after nothing any more: the parameters lie in other buffers now."""
        self._copied, self._params, self._slices, self._sliced, self._shown = [], [], [], [], []
        self.settled()

    def before_step(self) -> None:
        """What was written into the module's parameters is stepped; what into slices is seen after the update."""
        self._take_over(but=())
        for parameter in self._slices:
            parameter.__class__ = nn.Parameter

    def follow_grads(self) -> None:
        """Where `p.grad` of the module was replaced, the slices' gradients follow."""
        for flat in self._shown:
            flat.follow_shown_grads()

    def settle(self, *, announced: bool = False) -> None:
        """Before values are read: every copy of what was written follows, or the write is refused.

        With `announced`, the other ranks know, and what was written into slices is gathered next.
        """
        slices = [flat for flat in self._sliced if flat.writes.found]
        if not self._take_over(but=slices) and not slices:
            return
        for flat in slices:
            if flat.placement.params is SHARDED:
                flat.stage()
            elif flat.placement.optim is not SHARDED:
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
        """The masters of written parameters follow; refused where slices of the same buffer were written as well."""
        counts = self._count()
        if counts == self._counts and not any(flat.touched for flat in self._copied):
            return False
        changed = {id(p) for p, now, then in zip(self._params, counts, self._counts, strict=True) if now != then}
        for flat in self._copied:
            if not flat.touched and not any(id(parameter) in changed for parameter in flat.params):
                continue
            if any(flat is other for other in but):
                raise InvalidModel(
                    f"{flat.names[0]} or its neighbours were used in the module and written in optimizer.param_groups "
                    "since the last step, so that the newer value is not known: write inside "
                    "`with shardwise.edit(model):`"
                )
            flat.take_over()
        return True


def _nothing() -> None:
    """What is written is seen by the next gather."""
