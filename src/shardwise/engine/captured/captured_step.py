"""Calls of a step: first ordinary ones, which are observed, then replays of graphs. All ranks do the same.

ordinary   the step itself. Its reads, changes and waits are noted until it is captured; a step in which torch compiles
           something does not count
capture    once a key was seen a few times, and no rank has noted a reason against it
replay     the passes; then the update, if the step has read the values that were assumed; otherwise the passes are
           undone, another graph of the key is tried, and then the step runs as an ordinary one
compare    replays 1, 10, 100 …: the step is undone and runs as an ordinary one; the gradients of both are compared
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.comm.host_group import HostGroup
from shardwise.comm.leave import release_before_leaving
from shardwise.comm.rank_progress import PROGRESS
from shardwise.engine.captured.graph_store import GraphStore, KeyHistory, StoredGraph
from shardwise.engine.captured.probed_step import ProbedStep, StepProbe
from shardwise.engine.captured.replayed_grads import GradientComparison, is_compared, most_distance
from shardwise.engine.captured.shared_evaluation import SharedEvaluation
from shardwise.engine.captured.step_graphs import RecordedStep, StepRecorder
from shardwise.engine.captured.step_key import StepInputs, StepKey, flatten_inputs, optimizer_key, step_key
from shardwise.engine.captured.step_memory import STEPS, StepMemory
from shardwise.engine.core.step_events import heard_by
from shardwise.engine.engine import Engine
from shardwise.engine.graphs.python_state import PythonState
from shardwise.engine.graphs.reads import NotCaptured
from shardwise.engine.graphs.step_device import StepDevice
from shardwise.engine.protocol import Tell
from shardwise.errors import InvalidModel

# Ordinary steps before the first capture, and ordinary steps of a key before its capture.
WARM_STEPS = 3
_WARM_STEPS_OF_A_KEY = 2
# After this many steps, half of them should have been replays.
_MANY_STEPS = 200
# Graphs that are tried for one step.
_MOST_TRIES = 2
# Replays that are timed, and the largest ratio of their time to that of an ordinary step.
_TIMED = range(2, 5)
_MOST_RATIO = 1.1

# A rank's proposal for a step: run it, capture it, drop all graphs (a replay would overwrite a live tensor), or, from
# _FIRST_GRAPH on, replay the graph of number proposal - _FIRST_GRAPH.
_ORDINARY, _CAPTURE, _DROP, _FIRST_GRAPH = range(4)


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The last step: whether it was a replay, and the decision that was made in it ("": none)."""

    captured: bool = False
    note: str = ""


class CapturedStep:
    """A step that is captured when it can be. It is called like the step itself."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        model: nn.Module,
        engine: Engine,
        optimizer: Optimizer,
        state: PythonState,
        device: StepDevice,
        recorder: StepRecorder,
        memory: StepMemory,
        group: HostGroup,
        must: bool,
        tell: Tell,
    ) -> None:
        self.step = step
        self.report = StepReport()
        self.stopped = ""
        self._engine = engine
        self._optimizer = optimizer
        self._state = state
        self._device = device
        self._recorder = recorder
        self._memory = memory
        self._evaluation = SharedEvaluation(model, memory=memory, device=device)
        self._group = group
        # A step that cannot be captured is an error (capture = 'on').
        self._must = must
        self._tell = tell
        self._store: GraphStore[RecordedStep] = GraphStore()
        self._parameters = [parameter for flat in engine.core.flats for parameter in flat.params]
        self._optimizer_key: tuple[Any, ...] = ()
        self._num_steps = 0
        # Ordinary steps without, and with, a compilation.
        self._num_warm = 0
        self._num_compiling = 0
        self._num_replays = 0
        # Consecutive ordinary steps that could not have been captured, and the reason of the last one.
        self._num_unfit = 0
        self._unfit = ""
        self._ordinary_seconds: list[float] = []
        self._replay_seconds: list[float] = []
        release_before_leaving(self)
        engine.captured.add(self)
        if engine.graphs is not None:
            engine.graphs.pause()

    def release(self) -> None:
        """Destroy the graphs; later steps are captured again."""
        self._store.clear()

    def follow_plan(self) -> None:
        """Start over under the engine's new plan, which uses other memory."""
        self.release()
        self._recorder.forget_samples()
        self._ordinary_seconds.clear()
        self._replay_seconds.clear()
        why = self._engine.core.followed.plan.why_not_captured()
        if why and not self.stopped:
            self._stop(why)

    def __call__(self, *inputs: Any) -> Any:
        self._engine.core.setting.passes.check_values("a step")
        self._num_steps += 1
        self.report = StepReport()
        self._evaluation.leave()
        # Graphs read the buffers.
        self._engine.guards.managed.put_back()
        if not self.stopped and self._num_steps == _MANY_STEPS and self._num_replays < _MANY_STEPS / 2:
            self._give_up()
        if self.stopped:
            return self._ordinary(inputs)
        # The graphs assume that nothing of an earlier step is in flight.
        for beside in self._engine.core.setting.beside:
            beside.join()
        flattened = flatten_inputs(inputs)
        history, proposal, why = self._propose(flattened)
        # Ranks whose proposals differ all run an ordinary step.
        same = self._group.all_same(proposal)
        if proposal == _DROP if same else _DROP in self._group.gather(proposal):
            self._drop_graphs()
        if not same or proposal in (_ORDINARY, _DROP):
            return self._watched(inputs, history)
        if proposal == _CAPTURE and not self._capture(history, flattened, why=why):
            return self._ordinary(inputs)
        assert history is not None
        return self._replay(history, flattened, inputs)

    def _propose(self, inputs: StepInputs) -> tuple[KeyHistory[RecordedStep] | None, int, str]:
        """Return the history of the step's key, this rank's proposal, and its reason against capturing ("": none)."""
        if self._engine.core.setting.tape.recording or self._holds_grads():
            return None, _ORDINARY, ""
        settled = optimizer_key(self._optimizer)
        if settled != self._optimizer_key:
            self.release()
            self._optimizer_key = settled
        try:
            history = self._store.find(self._key(inputs))
        except NotCaptured as why:
            return None, _CAPTURE if self._num_warm >= WARM_STEPS else _ORDINARY, str(why)
        if history.graphs:
            return history, _FIRST_GRAPH + history.graphs[0].number if self._memory.is_clear() else _DROP, ""
        if self._num_warm < WARM_STEPS:
            return history, _ORDINARY, ""
        if history.probe is not None and history.probe.compiled:
            return history, _ORDINARY, ""
        # A single unfit step may have made state that later ones find.
        if self._num_unfit > 1:
            return history, _CAPTURE, self._unfit
        return history, _CAPTURE if history.num_ordinary >= _WARM_STEPS_OF_A_KEY else _ORDINARY, ""

    def _key(self, inputs: StepInputs) -> StepKey:
        return step_key(
            inputs,
            device=self._engine.device,
            parameters=self._parameters,
            passes=self._engine.core.setting.passes,
            state=self._state,
        )

    def _holds_grads(self) -> bool:
        """Return whether there are gradients of an earlier backward, which would be part of the step."""
        return self._engine.core.executor.holds_grads or any(flat.master.has_grads for flat in self._engine.core.flats)

    # Ordinary steps

    def _ordinary(self, inputs: tuple[Any, ...]) -> Any:
        with self._device.on_stream(), self._memory.of_step(inputs):
            result = self.step(*inputs)
        if self._store.num_graphs and not self._memory.is_shared_with(STEPS):
            # Blocks of ordinary steps are seldom used once there are graphs.
            self._device.release_memory()
        return self._memory.copied_out(result, user=STEPS)

    def _watched(self, inputs: tuple[Any, ...], history: KeyHistory[RecordedStep] | None) -> Any:
        """Run an ordinary step and note the reasons against capturing it."""
        if history is None:
            self._num_warm += 1
            return self._ordinary(inputs)
        probed = ProbedStep(self._engine, state=self._state, device=self._device)
        result = probed.run(lambda: self._ordinary(inputs), leaves_grads=self._holds_grads)
        history.probe = probed.probe
        if probed.probe.compiled:
            # Its time includes the compiler's, and later steps may run other code.
            self._num_compiling += 1
        else:
            self._count(history, probed.probe)
        if self._num_warm <= WARM_STEPS:
            # First steps set attributes that later ones find.
            self._state.find_places()
        self._optimizer_key = optimizer_key(self._optimizer) if self._num_steps == 1 else self._optimizer_key
        return result

    def _count(self, history: KeyHistory[RecordedStep], probe: StepProbe) -> None:
        self._num_warm += 1
        history.num_ordinary += 1
        self._unfit = probe.why_not
        self._num_unfit = self._num_unfit + 1 if self._unfit else 0
        self._ordinary_seconds.append(probe.seconds)

    # Capture

    def _capture(self, history: KeyHistory[RecordedStep] | None, inputs: StepInputs, *, why: str = "") -> bool:
        """Record the step, assuming the values that it read last; return whether all ranks succeeded.

        `why`: this rank's reason against it ("": none).
        """
        probe = None if history is None else history.probe
        if not why and probe is not None:
            why = probe.why_not or ("" if self._must else self._device.lacks_memory())
        compiled = probe is not None and probe.compiled
        reads, early = probe is not None and bool(probe.reads), probe is None or probe.early
        everyone = self._group.gather((why, reads, early, compiled, self._memory.is_clear()))
        # A step in which a rank has compiled does not describe the next one.
        if any(others[3] for others in everyone) or self._refused([others[0] for others in everyone]):
            return False
        if not all(is_clear for *_, is_clear in everyone):
            self._drop_graphs()
        assert history is not None
        assert probe is not None
        before = self._state.values()
        recorded, why = None, ""
        try:
            recorded = self._recorder.record(
                self.step,
                inputs,
                reads=probe.reads,
                guarded=any(others[1] for others in everyone),
                early=all(others[2] for others in everyone),
                written=probe.written,
            )
            changed = self._state.changed(before)
            why = f"{changed} changes in Python in each step" if changed else ""
        except NotCaptured as failed:
            why = str(failed)
        if self._refused(self._group.gather(why)) or recorded is None:
            if recorded is not None:
                recorded.release()
            return False
        is_first = self._store.num_graphs == 0 and self._num_replays == 0
        self._store.add(history, reads=tuple(probe.reads), graph=recorded)
        if is_first:
            num_guarded = len(probe.reads)
            guarded = f", {num_guarded} values that it looks at are guarded" if num_guarded else ""
            self._note(f"steps are replayed as CUDA graphs from here on{guarded}")
        return True

    def _drop_graphs(self) -> None:
        """Destroy all graphs, because a live tensor is in memory that they write; they are captured again around it."""
        self._store.drop_graphs()
        user = self._memory.blame()
        if user:
            self._note(f"{user} leave tensors behind that replays would overwrite: they get memory of their own")

    def _refused(self, reasons: Sequence[str]) -> bool:
        """Stop capturing if any rank has a reason against it; return whether one has."""
        for rank, why in enumerate(reasons):
            if why:
                self._stop(why if rank == 0 else f"rank {rank}: {why}")
                return True
        return False

    def _give_up(self) -> None:
        """Stop observing steps that are hardly ever replayed: observing costs time."""
        if not self._must:
            num_keys = len(self._store.histories)
            self._stop(
                f"only {self._num_replays} of {_MANY_STEPS} steps could be replayed: {num_keys} kinds of steps were "
                f"seen (shapes, modes, values of attributes), and something was compiled in {self._num_compiling}"
            )

    def _stop(self, why: str) -> None:
        """Run ordinary steps from now on; raise where the plan says capture = 'on'."""
        self.release()
        self.stopped = why
        self._memory.has_replays = False
        if self._engine.graphs is not None:
            # Units may do what the whole step cannot, in memory of their own. Until then this memory is used.
            self._engine.graphs.resume(leave_memory=self._memory.leave)
        if self._must:
            raise InvalidModel(f"the step cannot be captured: {why}; set capture = 'auto' or 'off'")
        self._note(f"ordinary steps, not captured: {why}")

    def _note(self, line: str) -> None:
        self.report.note = line
        self._tell(f"capture: {line}")

    # Replays

    def _replay(self, history: KeyHistory[RecordedStep], flattened: StepInputs, inputs: tuple[Any, ...]) -> Any:
        # An ordinary step's forward makes the same check.
        self._engine.guards.managed.check(thorough=False)
        # The graph assumes that no gather of an earlier update is in flight.
        self._engine.core.wait_gathers()
        timed = self._num_replays + 1 in _TIMED and not self._must
        began = self._device.settled_seconds() if timed else 0.0
        for tries, stored in enumerate(history.graphs[:_MOST_TRIES]):
            graph = stored.graph
            graph.load(flattened.leaves)
            graph.replay_passes()
            if not graph.holds():
                graph.undo()
                history.num_wasted += tries == 0
                continue
            self._num_replays += 1
            self._store.use(history, stored)
            history.num_captured += 1
            if is_compared(self._num_replays):
                return self._compared(stored, inputs)
            self._engine.guards.same_order.read()
            self._engine.guards.replicas.count_step()
            graph.replay_update()
            for beside in self._engine.core.setting.beside:
                beside.follow_replay()
            PROGRESS.end_step()
            self.report.captured = True
            result = graph.take_result()
            if timed and not tries:
                self._replay_seconds.append(self._device.settled_seconds() - began)
                self._check_pays()
            return result
        history.num_unfit += 1
        result = self._watched(inputs, history)
        if history.wants_another():
            self._capture(history, flattened)
        elif (why := history.why_not()) and not self._must:
            self._stop(why)
        return result

    def _compared(self, stored: StoredGraph[RecordedStep], inputs: tuple[Any, ...]) -> Any:
        """Undo replayed passes, run the step as an ordinary one instead, and compare the gradients of both."""
        samples = stored.graph.sample_grads()
        stored.graph.undo()
        comparison = GradientComparison(samples, self._recorder.owned_grads)
        with heard_by((self._engine.core.setting.events.gradients_asked, comparison.passes_are_over)):
            result = self._ordinary(inputs)
        distance = max(self._group.gather(comparison.distance))
        if distance > most_distance(flat.compute_dtype for flat in self._engine.core.flats):
            self._stop(
                f"replayed gradients differ from those of the same step run as an ordinary one by {distance:.1%}"
            )
        return result

    def _check_pays(self) -> None:
        """Stop capturing if the timed replays are slower than ordinary steps."""
        if len(self._replay_seconds) < len(_TIMED) - 1:
            return
        everyone = self._group.gather((min(self._replay_seconds), min(self._ordinary_seconds)))
        replay, ordinary = (max(seconds) for seconds in zip(*everyone, strict=True))
        self._replay_seconds.clear()
        if replay > _MOST_RATIO * ordinary:
            self._stop(f"a replay takes {replay * 1e3:.1f} ms, an ordinary step {ordinary * 1e3:.1f} ms")
