"""Runs calls of units as the current pass does: ordinary, traced, recorded or replayed."""

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.engine.activations.recompute import checkpoint_of, saved_hooks
from shardwise.engine.graphs.arena import Arenas, ObservedMemory
from shardwise.engine.graphs.checkpointed_calls import CheckpointedCalls, saving_itself
from shardwise.engine.graphs.given_inputs import GivenInputs, Refused
from shardwise.engine.graphs.not_captured import NotCaptured
from shardwise.engine.graphs.pass_form import is_special, why_untraceable
from shardwise.engine.graphs.recorded_pass import RecordedPass
from shardwise.engine.graphs.reports import Reports
from shardwise.engine.graphs.traced_graph import Outputs, TracedGraph
from shardwise.engine.graphs.traced_unit import TracedUnit
from shardwise.engine.hooks.step_hooks import recomputing


class Mode(Enum):
    """How the units of a pass run (unit_graphs.py)."""

    ORDINARY = auto()
    TRACED = auto()
    RECORDED = auto()
    REPLAYED = auto()


class _WritesPython(BaseException):
    pass


class UnitCalls:
    """The calls of one model's units.

    mode, recorded, observed  how the current pass runs; what it records or replays; what is noted of its memory
    num_calls, num_replayed   calls of units in passes, and those that were replays
    """

    def __init__(self, arenas: Arenas, *, reports: Reports, release: Callable[[], None]) -> None:
        self.mode = Mode.ORDINARY
        self.recorded: RecordedPass | None = None
        self.observed: ObservedMemory | None = None
        self.num_calls = self.num_replayed = 0
        self._arenas, self._reports, self._release = arenas, reports, release
        self._checkpointed = CheckpointedCalls()
        # Graphs that the current call of a unit has run, and those of them that were no replays.
        self._num_run = self._num_ordinary = 0
        # Graphs that have run for the first time in the current pass.
        self.num_new = 0

    # torch.compile around the model would trace it.
    @disable_dynamo
    def call(self, unit: TracedUnit, *inputs: Any, **options: Any) -> Any:
        self.num_calls += 1
        hooks = saved_hooks()
        checkpoint = checkpoint_of(hooks)
        if checkpoint is not None and recomputing():
            result = self._checkpointed.again(checkpoint, unit, unit.forward, (inputs, options))
            if result is not NotImplemented:
                return result
        is_other = is_special(unit.device) or (hooks is not None and checkpoint is None)
        if self.mode is Mode.ORDINARY or unit.why_not or is_other:
            return self._ordinary(unit.forward, *inputs, **options)
        if why := why_untraceable():
            self._reports.note(f"capture: ordinary units while {why}")
            return self._ordinary(unit.forward, *inputs, **options)
        if checkpoint is None:
            return self._traced(unit, inputs, options)
        if not unit.writes_python:
            unit.is_checkpointed = True
            try:
                with saving_itself():
                    result = self._traced(unit, inputs, options)
                self._checkpointed.add(checkpoint, unit, result=result)
                return result
            except _WritesPython:
                unit.writes_python = True
            finally:
                unit.is_checkpointed = False
        self._reports.note(
            "capture: ordinary units where torch.utils.checkpoint is around one that writes Python state"
        )
        return self._ordinary(unit.forward, *inputs, **options)

    def _traced(self, unit: TracedUnit, inputs: Any, options: Any) -> Any:
        self._num_run = self._num_ordinary = 0
        # Statistics of the allocator take longer than all else in a replay.
        allocated_bytes = self._arenas.all[0].device.allocated_bytes if self.mode is Mode.TRACED else None
        before = allocated_bytes() if allocated_bytes is not None else 0
        result = unit.call(inputs, options, run=self._run)
        if self.observed is not None and allocated_bytes is not None:
            self.observed.add_call(allocated_bytes() - before)
        self.num_replayed += bool(self._num_run) and not self._num_ordinary and self.mode is Mode.REPLAYED
        unit.note_call(num_graphs=self._num_run)
        if unit.why_not:
            # Found out just now, perhaps after others have been recorded; the line is the same for units of one class.
            self._reports.note(
                f"capture: ordinary units, not CUDA graphs: {type(unit.module).__name__}: {unit.why_not}"
            )
        return result

    def _run(self, unit: TracedUnit, graph: TracedGraph, inputs: tuple[Any, ...]) -> Outputs:
        """Run a traced graph of a unit."""
        self._num_run += 1
        # A checkpoint writes again in backward. Nothing of the unit has run if this is its first graph.
        if unit.is_checkpointed and graph.writes_python and self._num_run == 1:
            raise _WritesPython
        writes_again = unit.is_checkpointed and bool(graph.written)
        if writes_again:
            self._reports.note("capture: ordinary units where torch.utils.checkpoint is around one that writes buffers")
        is_graph = self.mode in (Mode.RECORDED, Mode.REPLAYED) and graph.has_run
        if is_graph and not graph.why_not and not writes_again:
            outputs = self._graphed(unit, graph, inputs)
            if outputs is not None:
                return outputs
        self._num_ordinary += 1
        run = unit.function_of(graph)
        if graph.has_run:
            outputs = self._ordinary(run, *inputs)
            return outputs  # type: ignore[no-any-return]
        self.num_new += 1
        random_state = self._arenas.all[0].device.random_state
        observed: Outputs = self._ordinary(partial(graph.observe, run, random_state=random_state), inputs)
        return observed

    def _ordinary(self, call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run an ordinary call; if memory runs out while graphs hold some, without them."""
        try:
            return call(*inputs, **options)
        except torch.OutOfMemoryError:
            if not self._arenas.hold_graphs or recomputing():
                raise
        self._release()
        return call(*inputs, **options)

    def _graphed(self, unit: TracedUnit, graph: TracedGraph, inputs: tuple[Any, ...]) -> Outputs | None:
        """Record or replay a graph; return None if it has to run in the ordinary way."""
        recorded = self.recorded
        assert recorded is not None
        if recorded.failed and not recorded.is_warm:
            return None
        try:
            given = GivenInputs(unit, graph, inputs, device=recorded.device)
            find = recorded.find if self.mode is Mode.REPLAYED else recorded.record
            found = find(unit, graph, given)
        except Refused as why:
            graph.why_not = str(why)
            return None
        except NotCaptured as why:
            recorded.fail(graph, str(why))
            return None
        outputs = recorded.replay(found, given) if found is not None else None
        recorded.missed = recorded.missed or outputs is None
        return outputs
