"""Forwards without gradients: no part of a step. A unit is gathered when it is needed, and freed at once.

Ranks may call different units here, too. Each takes part in the gathers of the units that it skips, in the order of the
step; where that may change (`dynamic`), they agree on each gather.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.groups.agreement import RanksMissing, about, meet
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.issued import of_no_step
from shardwise.comm.groups.rank_progress import NO_GRAD_FORWARD, PROGRESS
from shardwise.engine.core.executor import EngineExecutor
from shardwise.engine.core.first_forward import FirstForward
from shardwise.engine.core.unit import Unit
from shardwise.program import Kind, Row
from shardwise.program.rules.context import StepContext
from shardwise.program.rules.demand import demanded, released, rescaled
from shardwise.program.spec import ROOT


class EvaluationGathers:
    """Gathers units for forwards that ranks evaluate between two steps.

    agreed              how ranks agree on each gather, while they may evaluate different numbers of batches
    patience_seconds    how long a rank that continues with training waits for the others, who may be busy with results
    """

    def __init__(
        self,
        executor: EngineExecutor,
        *,
        group: Group,
        run: Callable[[Row], None],
        make_first_forward: Callable[[], FirstForward],
    ) -> None:
        self._executor, self._units, self._group = executor, executor.units, group
        self._run = run
        self._make_first_forward = make_first_forward
        self._gathered = False
        # The units that were gathered here, and not for a step that waits for its backward.
        self._own: set[str] = set()
        self._context: StepContext
        # The sharded units in the order of a forward of the model, and those that are left of the current one.
        self._calls: tuple[str, ...] = ()
        self._left: tuple[str, ...] = ()
        # How ranks agree in the current forward, if they do.
        self._dynamic = False
        self._forward: FirstForward | None = None
        self.agreed: FirstForward | None = None
        # The units that were read in the current forward outside of their own; None outside of a forward.
        self._lent: list[Unit] | None = None
        self.patience_seconds = float("inf")

    def follow(self, context: StepContext, *, dynamic: bool) -> None:
        """Expect the calls of a step in their order; `dynamic`: in any."""
        self._context, self._dynamic = context, dynamic
        self._calls = tuple(name for name in context.calls if self._units[name].sharded)

    def begin(self, unit: Unit) -> None:
        """Gather the unit for a forward."""
        gathers = unit.sharded or (unit.name == ROOT and bool(self._calls))
        if gathers and not self._gathered and self.agreed is None:
            # A rank that trains, or saves, could otherwise take its gathers for its own.
            meet(NO_GRAD_FORWARD, limit_seconds=self.patience_seconds)
        if gathers and self.agreed is None:
            self._rescale()
        if unit.name == ROOT and self.agreed is None and self._calls:
            if self._dynamic:
                self._forward = self._make_first_forward()
            else:
                self._left = self._calls
        agreed = self.agreed or self._forward
        with of_no_step(self._group.log):
            PROGRESS.together = self._group.size == dist.get_world_size()
            if agreed is None:
                self._gather_in_turn(unit)
            elif not unit.whole:
                self._own.add(unit.name)
                agreed.want(unit)
            unit.wait_gather()
        if unit.at_rest:
            unit.wake()
        self._gathered |= gathers
        PROGRESS.kind, PROGRESS.unit = Kind.FORWARD, unit.name
        if unit.name == ROOT:
            self._lent = []

    def lend(self, unit: Unit) -> bool:
        """Gather a unit whose parameters the current forward reads outside of it; return whether there is one."""
        if self._lent is None:
            return False
        self.begin(unit)
        self._lent.append(unit)
        return True

    def _rescale(self) -> None:
        """Take new scales for weights that are gathered in fewer bits, if values were written since. Collective."""
        scales = self._executor.scales
        if scales is not None and scales.stale and self._context.scales:
            with of_no_step(self._group.log):
                self._run(rescaled(self._context))

    def end_call(self, unit: Unit) -> None:
        """End a unit's forward: free it."""
        if unit.name == ROOT:
            lent, self._lent = self._lent or (), None
            for other in lent:
                self.end_call(other)
        if unit.name in self._own:
            self._own.discard(unit.name)
            self._run(released(unit.name))
        if not unit.sharded or not unit.whole:
            unit.end_backward()
        if unit.name == ROOT:
            self._end_forward()

    def leave_order(self) -> None:
        """Expect no order in the current forward: only a part of the model is called."""
        self._left = ()

    def _end_forward(self) -> None:
        with of_no_step(self._group.log):
            if self._forward is not None:
                self._forward.end()
            self._skip(len(self._left))
        self._forward = None

    def _gather_in_turn(self, unit: Unit) -> None:
        """Gather a unit, and before it those that come earlier in the order of the calls."""
        if unit.name in self._left:
            self._skip(self._left.index(unit.name))
            self._left = self._left[1:]
        elif unit.whole:
            return
        if not unit.whole:
            self._own.add(unit.name)
        # Also if it is gathered already: ranks may differ in that.
        unit.wait_gather()
        self._run(demanded(unit.name, self._context))

    def _skip(self, num_calls: int) -> None:
        """Take part in the gathers of calls that other ranks may make."""
        skipped, self._left = self._left[:num_calls], self._left[num_calls:]
        for unit in (self._units[name] for name in skipped):
            was_whole = unit.whole
            unit.wait_gather()
            self._run(demanded(unit.name, self._context))
            if not was_whole:
                self._run(released(unit.name))

    def end(self) -> None:
        """End the evaluation before a step, whose gathers must not meet those of a rank that still evaluates."""
        if not self._gathered:
            return
        try:
            meet("a step after an evaluation", limit_seconds=self.patience_seconds)
        except RanksMissing as missing:
            line = (
                f"{missing}; where ranks evaluate different numbers of batches, do it inside `with "
                "shardwise.evaluating(model):`"
            )
            raise about(RanksMissing(line), missing.peer) from None
        self._gathered = False

    @contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Agree with the other ranks on each gather in this block, until all have left it. Collective."""
        meet(what, limit_seconds=self.patience_seconds)
        self._rescale()
        self.agreed = self._make_first_forward()
        try:
            yield
            with of_no_step(self._group.log):
                self.agreed.end()
            self._gathered = False
        finally:
            self.agreed = None
