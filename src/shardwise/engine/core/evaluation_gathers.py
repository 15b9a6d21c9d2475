"""Forwards without gradients: no part of a step. A unit is gathered when it is needed, and freed at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.agreement import RanksMissing, meet
from shardwise.comm.groups import Group
from shardwise.comm.issued import of_no_step
from shardwise.comm.rank_progress import NO_GRAD_FORWARD, PROGRESS
from shardwise.engine.core.first_forward import FirstForward
from shardwise.engine.core.unit import Unit
from shardwise.program import Kind


class EvaluationGathers:
    """Gathers units for forwards that ranks evaluate between two steps.

    agreed              how ranks agree on each gather, while they may evaluate different numbers of batches
    patience_seconds    how long a rank that continues with training waits for the others, who may be busy with results
    """

    def __init__(
        self, group: Group, *, gather: Callable[[Unit], None], make_first_forward: Callable[[], FirstForward]
    ) -> None:
        self._group = group
        self._gather = gather
        self._make_first_forward = make_first_forward
        self._gathered = False
        self.agreed: FirstForward | None = None
        self.patience_seconds = float("inf")

    def begin(self, unit: Unit) -> None:
        """Gather the unit for a forward."""
        if unit.sharded and not self._gathered and self.agreed is None:
            # A rank that trains, or saves, could otherwise take its gathers for its own.
            meet(NO_GRAD_FORWARD, limit_seconds=self.patience_seconds)
        with of_no_step(self._group.log):
            PROGRESS.together = self._group.size == dist.get_world_size()
            if self.agreed is not None:
                self.agreed.want(unit)
            elif not unit.whole:
                self._gather(unit)
            unit.wait_gather()
        if unit.at_rest:
            unit.wake()
        self._gathered |= unit.sharded
        PROGRESS.kind, PROGRESS.unit = Kind.FORWARD, unit.name

    def end(self) -> None:
        """End the evaluation before a step, whose gathers must not meet those of a rank that still evaluates."""
        if not self._gathered:
            return
        try:
            meet("a step after an evaluation", limit_seconds=self.patience_seconds)
        except RanksMissing as missing:
            raise RanksMissing(
                f"{missing}; where ranks evaluate different numbers of batches, do it inside `with "
                "shardwise.evaluating(model):`"
            ) from None
        self._gathered = False

    @contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Agree with the other ranks on each gather in this block, until all have left it. Collective."""
        meet(what, limit_seconds=self.patience_seconds)
        self.agreed = self._make_first_forward()
        try:
            yield
            with of_no_step(self._group.log):
                self.agreed.end()
            self._gathered = False
        finally:
            self.agreed = None
