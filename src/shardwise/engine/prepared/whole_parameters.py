"""`shardwise.whole`: unsharded parameters on every rank, for a block of code that reads or writes them.

In the block the module's parameters have the values of the optimizer's masters in full precision, even if units compute
in bf16. Where modules compute with the masters themselves (replicated fp32 parameters), it costs nothing; elsewhere a
buffer of each unit's parameters is gathered, and freed after the block.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.base.errors import InvalidModel
from shardwise.comm.groups.agreement import RanksDisagree, exchange, meet
from shardwise.engine.core.edited_values import distribute
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.engine import EngineParts
from shardwise.engine.guards.guard import wake
from shardwise.engine.guards.replicas import bit_sums

_NAME = "shardwise.whole(model)"


@contextmanager
def whole(engine: EngineParts, *, write: bool = False) -> Iterator[None]:
    """Make the parameters whole on every rank in this block, to read them, or with `write` to write them. Collective.

        with shardwise.whole(model):
            averaged.update_parameters(model)

        with shardwise.whole(model, write=True), torch.no_grad():
            for parameter in model.parameters():      # the same on every rank
                parameter.clamp_(-1, 1)

    They have the values and the dtype that the optimizer steps, and writes go there. No forward and no step inside. It
    takes the memory of all parameters in that dtype, unless they are whole in it already.
    """
    passes = engine.core.setting.passes
    passes.check_values(_NAME)
    if write:
        engine.check_between_steps(what=_NAME)
    engine.check_state(what=_NAME)
    if write or not engine.holds_all:
        meet(_NAME, limit_seconds=engine.core.followed.limit_seconds)
    engine.core.wait_gathers()
    lent = [_Lent(flat) for flat in engine.core.flats]
    passes.values_by, passes.lent = f"`with {_NAME}:`", True
    try:
        for one in lent:
            one.lend()
        before = [] if write else _seen(lent)
        yield
        if write:
            _check_alike(lent)
            for one in lent:
                one.take_over()
        else:
            _check_unwritten(lent, before=before)
    finally:
        for one in lent:
            one.take_back()
        passes.values_by, passes.lent = "", False
    if write:
        distribute(engine.core)


class _Lent:
    """A flat buffer whose parameters are unsharded in the block."""

    def __init__(self, flat: FlatParams) -> None:
        self.flat = flat
        self._classes = [type(parameter) for parameter in flat.params]
        # None if the optimizer steps the memory that modules compute with.
        self._gathered = None if flat.master.aliased else flat.full_master()
        self.views: list[Tensor] = flat.full.views if self._gathered is None else flat.full.views_of(self._gathered)

    def lend(self) -> None:
        wake(self.flat.params)
        for parameter, view in zip(self.flat.params, self.views, strict=True):
            if self._gathered is not None:
                parameter.data = view

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the values that the block has left into the masters."""
        flat = self.flat
        if self._gathered is not None:
            flat.write_master(self._gathered[flat.full.part(flat.placement.optim)])

    def take_back(self) -> None:
        """Make the parameters views of the full buffer again, with their guards."""
        for parameter, view, kind in zip(self.flat.params, self.flat.full.views, self._classes, strict=True):
            if self._gathered is not None:
                parameter.data = view
            parameter.__class__ = kind


def _names(lent: list[_Lent]) -> list[str]:
    return [name for one in lent for name in one.flat.names]


def _seen(lent: list[_Lent]) -> list[tuple[int, int]]:
    """Return, for each parameter, torch's count of writes to it and the sum of its bits."""
    counts = [parameter._version for one in lent for parameter in one.flat.params]
    return list(zip(counts, bit_sums([view for one in lent for view in one.views]), strict=True))


def _check_unwritten(lent: list[_Lent], *, before: list[tuple[int, int]]) -> None:
    for name, then, now in zip(_names(lent), before, _seen(lent), strict=True):
        if then != now:
            raise InvalidModel(
                f"{name} was written inside `with {_NAME}:`, which lends parameters to be read: say "
                "shardwise.whole(model, write=True), and write the same on every rank"
            )


def _check_alike(lent: list[_Lent]) -> None:
    """Refuse different values on different ranks, since each rank keeps only its own slices. Collective."""
    everyone = exchange(bit_sums([view for one in lent for view in one.views]))
    for name, *sums in zip(_names(lent), *everyone, strict=True):
        different = next((rank for rank, one in enumerate(sums) if one != sums[0]), None)
        if different is not None:
            raise RanksDisagree(
                f"rank 0 and rank {different} have written different values into {name} inside "
                "`with shardwise.whole(model, write=True):`: write the same on every rank"
            )
