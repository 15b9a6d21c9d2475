"""Records one step: its rows, with what the engine held at each, and its memory ledger."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.measure.profile.cuda_allocations import AllocatorHistory
from shardwise.measure.profile.memory_ledger import Lasts, LedgerMark, MemoryLedger, OperationMark, ledger_of
from shardwise.measure.profile.step_rows import known_storages, step_rows
from shardwise.program import Trigger
from shardwise.program.spec import ModelSpec

# Our engine learns the order of units in the first step, and optimizers make their states in it.
WARM_UP_STEPS = 2
_STEP, _ROW, _OPERATION = "step", "row", "operation"

Recording = LiveBytes | AllocatorHistory
"""A recording of allocations, on a CPU or on a GPU."""


def allocations_on(device: torch.device, *, stacks: bool = False) -> Recording:
    """Record allocations; enter it before the first tensor of interest is made. `stacks`: on a GPU, with code lines."""
    return AllocatorHistory(stacks=stacks) if device.type == "cuda" else LiveBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """The beginning of a row, with what the engine held then.

    moment   of time.perf_counter; paused_seconds: how long recording the rows up to this one took
    """

    trigger: Trigger
    unit: str
    known: dict[int, str]
    reserved_bytes: int | None
    moment: float
    paused_seconds: float


class StepRecording:
    """Marks the rows of one step in a recording of allocations.

    `modules` are the units of `spec` from before an engine prepared the model. The caller sets `batch`.
    """

    def __init__(
        self,
        live: Recording,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        spec: ModelSpec,
        modules: Mapping[str, nn.Module],
        device: torch.device,
    ) -> None:
        self.rows: list[RecordedRow] = []
        self._operations: list[tuple[str, Lasts]] = []
        self.batch: Any = None
        self._live = live
        self._model = model
        self._optimizer = optimizer
        self._spec = spec
        self._modules = modules
        self._on_gpu = device.type == "cuda"
        self._recording = False
        self._began = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks; enter it before the first forward."""
        with step_rows(self._optimizer, spec=self._spec, modules=self._modules, on_row=self._on_row):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the step in this block, which follows WARM_UP_STEPS others."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._recording = True
        with self._live.phase(_STEP):
            self._began = time.perf_counter()
            yield
        self._recording = False

    def _on_row(self, trigger: Trigger, unit: str) -> None:
        if not self._recording:
            return
        moment = time.perf_counter()
        known = known_storages(self._model, self._optimizer, batch=self.batch)
        reserved = torch.cuda.memory_reserved() if self._on_gpu else None
        with self._live.phase(_ROW):
            pass
        paused = self.rows[-1].paused_seconds if self.rows else 0.0
        self.rows.append(
            RecordedRow(
                trigger=trigger,
                unit=unit,
                known=known,
                reserved_bytes=reserved,
                moment=moment,
                paused_seconds=paused + time.perf_counter() - moment,
            )
        )

    def note_operation(self, label: str, *, lasts: Lasts) -> None:
        """Mark an operation when it is taped."""
        if self._recording:
            with self._live.phase(_OPERATION):
                pass
            self._operations.append((label, lasts))

    def place(self, moment: float) -> tuple[int, float]:
        """Return the row of a moment of time.perf_counter, and the seconds since the step began less the recording."""
        row = max(0, bisect_right(self.rows, moment, key=lambda row: row.moment) - 1)
        return row, moment - self._began - self.rows[row].paused_seconds

    def ledger(self) -> MemoryLedger:
        """Return the ledger, after the recording of allocations has ended."""
        marks = [
            LedgerMark(
                label=f"{row.trigger.value} {row.unit}",
                moment=self._live.span(_ROW, run=number)[0],
                known=row.known,
                computes=row.trigger is not Trigger.AFTER_STEP,
                reserved_bytes=row.reserved_bytes,
            )
            for number, row in enumerate(self.rows)
        ]
        operations = [
            OperationMark(label=label, moment=self._live.span(_OPERATION, run=number)[0], lasts=lasts)
            for number, (label, lasts) in enumerate(self._operations)
        ]
        end = self._live.span(_STEP)[1]
        return ledger_of(self._live.allocations, marks=marks, end=end, operations=operations)
