"""A step as two CUDA graphs: its passes up to the reduced gradients, and its update. A third one, for comparisons,
copies some elements of the gradients.

    A   flag = 0 · copies of the tensors that the step writes · passes and reduces; each value that Python reads is
        compared with the assumed one, and after the last read the sum of all ranks' flags is copied to the host
    B   clipping, update, and the gathers after it

The flag is on the host while backward still runs, so that B is launched before A has ended. If it is not 0, B is not
launched: the step is undone, and everything that outlives it is unchanged.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only, tree_unflatten

from shardwise.comm.agreement import RanksMissing
from shardwise.comm.groups import job_timeout
from shardwise.engine.activations.recompute import without_random_numbers
from shardwise.engine.captured.replayed_grads import sampled
from shardwise.engine.captured.step_key import StepInputs
from shardwise.engine.captured.step_memory import StepMemory
from shardwise.engine.captured.written_tensors import WrittenTensors
from shardwise.engine.core.step_events import heard_by
from shardwise.engine.engine import Engine
from shardwise.engine.graphs.graph_fills import fill_by_kernels
from shardwise.engine.graphs.reads import NotCaptured, Read, assuming_reads, hidden_capture, in_one_line
from shardwise.engine.graphs.step_pool import Block
from shardwise.vocabulary.collection import without_collection

# The flag on the host before the device has written it.
_NOT_YET = -1
_POLL_SECONDS = 2e-5
_LIMIT_SECONDS = 1800.0


class StepRecorder:
    """Records steps of one model; their graphs share one pool of memory, in which nothing outlives a replay."""

    def __init__(self, engine: Engine, optimizer: Optimizer, *, stream: torch.cuda.Stream, memory: StepMemory) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.stream = stream
        self.memory = memory
        self.generator = torch.cuda.default_generators[stream.device_index]
        self._side = torch.cuda.Stream(engine.device)  # type: ignore[no-untyped-call]
        # Some elements of each gradient, shared by all graphs: they are read right after a replay.
        self._samples: dict[int, Tensor] = {}

    def record(
        self,
        step: Callable[..., Any],
        inputs: StepInputs,
        *,
        reads: Sequence[Read],
        guarded: bool,
        early: bool,
        written: Sequence[Tensor],
    ) -> "RecordedStep":
        """Run `step` once, on copies of its inputs, without computing anything. Raises NotCaptured.

        reads      the values that it is given where it reads one
        guarded    whether any rank reads one
        early      all reads come before the last backward, on all ranks
        written    the tensors that it writes besides parameters, gradients and the optimizer's state
        """
        # The graph reads its inputs at these addresses: `load` copies them there.
        leaves = tree_map_only(Tensor, Tensor.clone, inputs.leaves)
        recorded = RecordedStep(self, leaves=leaves, written=written, guarded=guarded, early=early)
        # What an earlier step has started is not part of the graph.
        self.meet()
        for beside in self.engine.core.setting.beside:
            beside.begin_recording()
        gc.collect()
        torch.cuda.synchronize(self.engine.device)
        torch.cuda.empty_cache()
        random_state = self.generator.clone_state()
        try:
            in_use = self.memory.begin_recording()
            with self._recording(recorded, reads):
                recorded.begin()
                recorded.result = step(*tree_unflatten(leaves, inputs.tree))
                recorded.end()
            recorded.held = self.memory.end_recording(in_use, result=recorded.result)
        except (NotCaptured, RuntimeError) as error:
            recorded.abort()
            # After a failed capture the device's generator still waits for its end, and could not draw numbers.
            self.generator.graphsafe_set_state(random_state)
            self.engine.core.abandon_captured()
            self.optimizer.zero_grad(set_to_none=True)
            raise NotCaptured(in_one_line(error)) from error
        return recorded

    @contextmanager
    def _recording(self, recorded: "RecordedStep", reads: Sequence[Read]) -> Iterator[None]:
        events = self.engine.core.setting.events
        self.memory.is_recording = True
        try:
            with (
                heard_by(
                    (events.last_backward_begins, recorded.last_backward_begins),
                    (events.gradients_asked, recorded.passes_are_over),
                ),
                torch.cuda.stream(self.stream),
                torch.compiler.set_stance("fail_on_recompile"),
                without_random_numbers(),
                hidden_capture(),
                # A cycle may hold a pool of memory, which cannot be freed during a capture.
                without_collection(),
                assuming_reads(reads, device_type="cuda", compare=recorded.compare),
            ):
                yield
        finally:
            self.memory.is_recording = False
            for beside in self.engine.core.setting.beside:
                beside.forget_recording()

    def meet(self) -> None:
        """Let the computation wait for everything that runs at the same time."""
        self.engine.core.wait_gathers()
        for beside in self.engine.core.setting.beside:
            beside.join()

    def owned_grads(self) -> list[Tensor | None]:
        """Return the gradients that the update will use on this rank."""
        return [part.parameter.grad for flat in self.engine.core.flats for part in flat.master.owned]

    def forget_samples(self) -> None:
        """Drop the samples: gradients have other sizes from now on."""
        self._samples.clear()

    def samples(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors into which `sampled(grads)` are copied, always the same ones."""
        for index, sample in enumerate(sampled(grads)):
            if sample is not None and index not in self._samples:
                self._samples[index] = torch.empty_like(sample)
        return [None if grad is None else self._samples[index] for index, grad in enumerate(grads)]


class RecordedStep:
    """The graphs of a step. It also listens to the step while it is recorded."""

    def __init__(
        self, recorder: StepRecorder, *, leaves: list[Any], written: Sequence[Tensor], guarded: bool, early: bool
    ) -> None:
        self.result: Any = None
        # Blocks of the pool that it keeps in use.
        self.held: set[Block] = set()
        self._recorder = recorder
        self._leaves = leaves
        self._written = WrittenTensors(written)
        self._guarded = guarded
        self._early = early
        self._flag = torch.zeros((), dtype=torch.int32, device=recorder.engine.device)
        self._seen = torch.full((), _NOT_YET, dtype=torch.int32, pin_memory=True)
        self._sent = False
        self._passes = torch.cuda.CUDAGraph(keep_graph=True)
        self._update = torch.cuda.CUDAGraph(keep_graph=True)
        # Copies some elements of the gradients, whose own memory is free once the step is recorded.
        self._sampling = torch.cuda.CUDAGraph(keep_graph=True)
        self._samples: list[Tensor | None] = []
        self._capturing: torch.cuda.CUDAGraph | None = None
        self._offset = 0
        self._alive = True

    # Recording

    def begin(self) -> None:
        self._begin(self._passes)
        with torch.no_grad():
            self._flag.zero_()
        self._written.note()

    def compare(self, tensor: Tensor, assumed: bool) -> None:
        """Compare a value that the step reads with the `assumed` one that it is given."""
        with torch.no_grad():
            self._flag.add_(tensor.detach().reshape(()).bool().ne(assumed))

    def last_backward_begins(self) -> None:
        if self._early:
            self._send_flag()

    def passes_are_over(self) -> None:
        """End the first graph and begin the second."""
        if self._capturing is not self._passes:
            return
        # Nothing may be in flight when a graph ends.
        self._recorder.meet()
        self._send_flag()
        if self._sent:
            self._recorder.stream.wait_stream(self._recorder._side)
        self._end()
        grads = self._recorder.owned_grads()
        self._samples = self._recorder.samples(grads)
        self._begin(self._sampling)
        with torch.no_grad():
            for place, sample in zip(self._samples, sampled(grads), strict=True):
                if place is not None and sample is not None:
                    place.copy_(sample)
        self._end()
        self._begin(self._update)

    def end(self) -> None:
        if self._capturing is not self._update:
            raise NotCaptured("the step does not call optimizer.step()")
        self._recorder.meet()
        if self._recorder.engine.core.executor.holds_grads or any(
            grad is not None for grad in self._recorder.owned_grads()
        ):
            raise NotCaptured("the step leaves gradients behind: call optimizer.zero_grad() at its end")
        self._end()

    def abort(self) -> None:
        """End a failed recording, in any state."""
        ended = True
        if self._capturing is not None:
            graph, self._capturing = self._capturing, None
            try:
                with torch.cuda.stream(self._recorder.stream):
                    graph.capture_end()
            except RuntimeError:
                # The error of the failed capture, again.
                ended = False
        self.release()
        if not ended:
            self._recorder.memory.pool.abort()

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        self._capturing = graph
        # thread_local: the backend's threads may query the device meanwhile.
        graph.capture_begin(pool=self._recorder.memory.pool.id, capture_error_mode="thread_local")

    def _end(self) -> None:
        assert self._capturing is not None
        graph, self._capturing = self._capturing, None
        graph.capture_end()
        fill_by_kernels(graph)
        graph.instantiate()

    def _send_flag(self) -> None:
        """Copy the sum of all ranks' flags to the host while the device continues."""
        if self._sent or not self._guarded:
            return
        self._sent = True
        group = self._recorder.engine.core.setting.groups.world
        side = self._recorder._side
        with torch.cuda.stream(self._recorder.stream), torch.no_grad():
            work = dist.all_reduce(self._flag, group=group.handle, async_op=True) if group.size > 1 else None
            side.wait_stream(self._recorder.stream)
        with torch.cuda.stream(side), torch.no_grad():
            if work is not None:
                work.wait()
            self._seen.copy_(self._flag, non_blocking=True)

    # Replays

    def load(self, leaves: Sequence[Any]) -> None:
        """Copy a step's inputs to where the graph reads them."""
        for place, value in zip(self._leaves, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value, non_blocking=True)

    def replay_passes(self) -> None:
        self._offset = self._recorder.generator.get_offset()
        self._seen.fill_(_NOT_YET)
        self._passes.replay()

    def holds(self) -> bool:
        """Return whether the step has read the assumed values on all ranks. Waits until that is known."""
        if not self._guarded:
            return True
        seen = self._seen.numpy()
        timeout = job_timeout()
        limit = time.monotonic() + (timeout.total_seconds() if timeout is not None else _LIMIT_SECONDS)
        while int(seen) == _NOT_YET:
            # Raises for an error on the device.
            torch.cuda.current_stream(self._recorder.engine.device).query()
            if time.monotonic() > limit:
                raise RanksMissing("a captured step did not end: a rank is missing or has failed")
            time.sleep(_POLL_SECONDS)
        return int(seen) == 0

    def replay_update(self) -> None:
        self._update.replay()

    def sample_grads(self) -> list[Tensor | None]:
        """Return some elements of the gradients (`sampled`), after `replay_passes`."""
        self._sampling.replay()
        return self._samples

    def undo(self) -> None:
        """Undo `replay_passes`: restore everything that outlives a step."""
        self._written.undo()
        self._recorder.generator.set_offset(self._offset)

    def take_result(self) -> Any:
        # The next replay overwrites the result.
        return tree_map_only(Tensor, Tensor.clone, self.result)

    def release(self) -> None:
        """Destroy the graphs, which keep communicators and memory in use."""
        if not self._alive:
            return
        self._alive = False
        torch.cuda.synchronize(self._recorder.engine.device)
        for graph in (self._passes, self._sampling, self._update):
            graph.reset()
        self.result = None
        self._recorder.memory.forget(self.held)
