"""Graphs without a GPU: a replay is the step itself, in a thread that stops where the passes are over.

What a graph would do wrong is done wrong here too: it assumes what was read when it was recorded, it does not see
Python's later changes of what its step reads, and it writes into buffers until it is undone.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only, tree_unflatten

from shardwise.comm.host_group import HostGroup
from shardwise.engine.captured.captured_step import CapturedStep
from shardwise.engine.captured.replayed_grads import sampled
from shardwise.engine.captured.step_key import StepInputs
from shardwise.engine.captured.step_memory import StepMemory
from shardwise.engine.core.step_events import heard_by
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.graphs.python_state import PythonState
from shardwise.engine.graphs.reads import Read, noting_reads
from shardwise.engine.graphs.step_pool import Block


class CpuDevice:
    """The CPU in the place of a GPU. Times are what a test says; nothing waits for the device but reads."""

    type = "cpu"

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.seconds = iter(range(10**9))
        self.no_room = ""
        self.num_releases = 0
        self.free = 0.5

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        yield

    def enter_stream(self) -> str:
        return "the caller's"

    def leave_stream(self, caller: str) -> None:
        assert caller == "the caller's"

    def settle(self) -> None: ...

    def free_share(self) -> float:
        return self.free

    def random_offset(self) -> int:
        return 0

    def settled_seconds(self) -> float:
        return float(next(self.seconds))

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        yield []

    def release_memory(self) -> None:
        self.num_releases += 1

    def lacks_memory(self) -> str:
        return self.no_room


class CpuPool:
    """No memory, but what a test says is in use; `log` has what was done with it."""

    id = (0, 1)

    def __init__(self) -> None:
        self.is_filled = False
        self.in_use: set[Block] = set()
        self.log: list[str] = []

    def begin(self) -> None:
        assert not self.is_filled
        self.is_filled = True
        self.log.append("begin")

    def end(self) -> None:
        if self.is_filled:
            self.is_filled = False
            self.log.append("end")

    def abort(self) -> None: ...

    def blocks(self, *, settled: bool = False) -> set[Block]:
        return set(self.in_use)

    def renew(self) -> None:
        assert not self.is_filled
        self.log.append("renew")


class _Undone(Exception):  # noqa: N818
    pass


class CpuRecorder:
    def __init__(self, engine: Engine, optimizer: Optimizer, *, memory: StepMemory) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.memory = memory
        self.log: list[str] = []

    def record(
        self,
        step: Callable[..., Any],
        inputs: StepInputs,
        *,
        reads: Sequence[Read],
        guarded: bool,
        early: bool,
        written: Sequence[Tensor],
    ) -> "CpuGraph":
        self.log.append("record")
        held = self.memory.end_recording(self.memory.begin_recording(), result=None)
        return CpuGraph(self, step, inputs, reads=reads, written=written, held=held)

    def owned_grads(self) -> list[Tensor | None]:
        return [part.parameter.grad for flat in self.engine.core.flats for part in flat.master.owned]


class CpuGraph:
    def __init__(
        self,
        recorder: CpuRecorder,
        step: Callable[..., Any],
        inputs: StepInputs,
        *,
        reads: Sequence[Read],
        written: Sequence[Tensor],
        held: set[Block],
    ) -> None:
        self.recorder = recorder
        self.held = held
        self.step = step
        self.tree = inputs.tree
        self.leaves = tree_map_only(Tensor, Tensor.clone, inputs.leaves)
        self.assumed = list(reads)
        self.written = list(written)
        self.grads: list[Tensor | None] = []
        self.alive = True

    def load(self, leaves: Sequence[Any]) -> None:
        for place, value in zip(self.leaves, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)

    def replay_passes(self) -> None:
        assert self.alive
        assert self.recorder.memory.is_clear()
        self.recorder.log.append("passes")
        self.copies = [tensor.clone() for tensor in self.written]
        self.over, self.go_on = threading.Event(), threading.Event()
        self.keeps = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        while not self.over.wait(0.01):
            assert self.thread.is_alive(), self.error

    def _run(self) -> None:
        events = self.recorder.engine.core.setting.events
        try:
            with heard_by((events.gradients_asked, self.passes_are_over)), noting_reads("cpu") as noted:
                self.noted = noted
                self.result = self.step(*tree_unflatten(self.leaves, self.tree))
        except _Undone:
            pass
        except BaseException as error:  # shown by the thread that waits
            self.error = error

    def passes_are_over(self) -> None:
        if self.over.is_set():
            return
        self.grads = [None if grad is None else grad.clone() for grad in self.recorder.owned_grads()]
        self.over.set()
        self.go_on.wait()
        if not self.keeps:
            raise _Undone

    def holds(self) -> bool:
        differs = [read.value for read in self.noted.reads] != [read.value for read in self.assumed]
        flag = torch.tensor(int(differs))
        dist.all_reduce(flag)
        return not flag.item()

    def replay_update(self) -> None:
        self.recorder.log.append("update")
        self._end(keeps=True)

    def undo(self) -> None:
        self.recorder.log.append("undo")
        self._end(keeps=False)
        self.recorder.engine.core.abandon_captured()
        self.recorder.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, copy in zip(self.written, self.copies, strict=True):
                tensor.copy_(copy)

    def _end(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.go_on.set()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()
        assert self.error is None, self.error

    def take_result(self) -> Any:
        return tree_map_only(Tensor, Tensor.clone, self.result)

    def sample_grads(self) -> list[Tensor | None]:
        return sampled(self.grads)

    def release(self) -> None:
        self.alive = False
        self.recorder.memory.forget(self.held)


def captured_on_cpu(
    step: Callable[..., Any],
    model: Any,
    optimizer: Optimizer,
    *,
    functions: Sequence[Callable[..., Any]] = (),
    must: bool = False,
) -> tuple[CapturedStep, list[str], CpuRecorder]:
    """(the step, lines that it told, what its graphs did)."""
    engine = engine_of(model)
    device = CpuDevice()
    memory = StepMemory(CpuPool(), device=device, optimizer=optimizer)
    recorder = CpuRecorder(engine, optimizer, memory=memory)
    lines: list[str] = []
    captured = CapturedStep(
        step,
        model=model,
        engine=engine,
        optimizer=optimizer,
        state=PythonState(model, functions=(step, *functions)),
        device=device,  # type: ignore[arg-type]
        recorder=recorder,  # type: ignore[arg-type]
        memory=memory,
        group=HostGroup(),
        must=must,
        tell=lines.append,
    )
    return captured, lines, recorder
