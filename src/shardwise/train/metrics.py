"""What a step gave: `metrics.jsonl`, one line per step, and TensorBoard.

The loss of a step lies on the device, in parts on the ranks. To read it would make the CPU wait for the GPU in every
step, so the parts of several steps are kept where they are, and summed over ranks and read in one go: every log_every
steps, before an evaluation and before a checkpoint. Each step still has its line.
"""

import json
import math
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agreement import exchange
from shardwise.files.atomic import atomic_write
from shardwise.files.regular_file import open_to_append


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    loss            the mean over all samples of the step, on all ranks
    grad_norm       before clipping; None where train.clip_norm is 0
    num_samples     of this step; position: of the current epoch, seen after it
    seconds         and samples_per_s, tokens_per_s: means over the steps that were read together, without evaluation
                    and saving; num_ranks as they were then
    peak_bytes      the most that this rank held so far: of GPU memory (cuda), or of its process (rss), see peak_of
    evaluation      metrics after this step, if it was evaluated
    compile_seconds what torch.compile took of it on this rank; None where it compiled nothing
    captured        whether it was a replay of CUDA graphs; capture_note: what was decided of that in this step, and why
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    num_samples: int
    epoch: int
    position: int
    seconds: float
    samples_per_s: float
    tokens_per_s: float | None
    peak_bytes: int
    peak_of: str
    num_ranks: int
    evaluation: Mapping[str, float] | None = None
    compile_seconds: float | None = None
    captured: bool = False
    capture_note: str | None = None

    def to_json(self) -> str:
        """One line; JSON has no NaN, so what is not a number is null."""
        data = asdict(self)
        return json.dumps({name: _finite(value) for name, value in data.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken and not yet read: what the CPU knows of it, and what lies on the device."""

    step: int
    lr: float
    num_samples: int
    num_tokens: int | None
    epoch: int
    position: int
    loss: Tensor
    grad_norm: Tensor | None
    compile_seconds: float | None = None
    captured: bool = False
    capture_note: str | None = None


class Window:
    """The steps since the last time that the device was waited for."""

    def __init__(self, *, device: torch.device, num_ranks: int) -> None:
        self._device = device
        self._num_ranks = num_ranks
        self._taken: list[Taken] = []
        # Of the steps that were read last, those whose loss was NaN or Inf on this rank.
        self._nonfinite: list[int] = []
        self._started = time.perf_counter()

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, taken: Taken) -> None:
        self._taken.append(taken)

    def read(self) -> list[StepMetrics]:
        """The metrics of the steps in here, which is then empty. Collective, and it waits for the device.

        Losses are summed in float64, where sums of a few float32 are exact: the order of ranks does not matter.
        """
        taken, self._taken = self._taken, []
        if not taken:
            return []
        mine = torch.stack([step.loss.double() for step in taken])
        losses = mine.clone()
        dist.all_reduce(losses)
        means = [loss / self._num_ranks for loss in losses.tolist()]
        self._nonfinite = []
        if not all(map(math.isfinite, means)):
            own = zip(taken, mine.tolist(), strict=True)
            self._nonfinite = [step.step for step, loss in own if not math.isfinite(loss)]
        norms = [None if step.grad_norm is None else step.grad_norm.item() for step in taken]
        seconds = time.perf_counter() - self._started
        num_samples = sum(step.num_samples for step in taken)
        num_tokens = sum(step.num_tokens or 0 for step in taken)
        peak_bytes, peak_of = peak_memory(self._device)
        return [
            StepMetrics(
                step=step.step,
                loss=loss,
                grad_norm=norm,
                lr=step.lr,
                num_samples=step.num_samples,
                epoch=step.epoch,
                position=step.position,
                seconds=seconds / len(taken),
                samples_per_s=num_samples / seconds,
                tokens_per_s=num_tokens / seconds if num_tokens else None,
                peak_bytes=peak_bytes,
                peak_of=peak_of,
                num_ranks=self._num_ranks,
                compile_seconds=step.compile_seconds,
                captured=step.captured,
                capture_note=step.capture_note,
            )
            for step, loss, norm in zip(taken, means, norms, strict=True)
        ]

    def ranks_of_nonfinite(self, step: int) -> list[int]:
        """The ranks on which the loss of a step that was read last was NaN or Inf. Collective."""
        return [rank for rank, steps in enumerate(exchange(self._nonfinite)) if step in steps]

    def restart_clock(self) -> None:
        """What came between two windows is no part of a step."""
        self._started = time.perf_counter()


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, of what): this rank's GPU allocations, or the resident memory of its process, at their largest."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss"


class Writer(Protocol):
    """Where metrics go: those of one or more steps at a time, in order, each step once."""

    def write(self, steps: Sequence[StepMetrics]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`, each step exactly once, also after a restart: lines of steps that will be redone are cut off."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        # First, to refuse a link: what is cut or added must be this run's own file. Cutting replaces it.
        os.close(open_to_append(path))
        cut_after(path, last_step=last_step)
        self._file = os.fdopen(open_to_append(path), "a", encoding="utf-8")

    def write(self, steps: Sequence[StepMetrics]) -> None:
        self._file.writelines(metrics.to_json() + "\n" for metrics in steps)
        # On disk before a checkpoint is, which says that these steps will not be redone.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class MetricsRecorder:
    """Gives the metrics of steps to every writer, then to `on_step`, one by one. `last` is the newest step's."""

    def __init__(self, writers: Sequence[Writer], *, on_step: Callable[[StepMetrics], None] | None) -> None:
        self._writers = writers
        self._on_step = on_step
        self.last: StepMetrics | None = None

    def record(self, steps: Sequence[StepMetrics]) -> None:
        self.last = steps[-1]
        for writer in self._writers:
            writer.write(steps)
        if self._on_step is not None:
            for metrics in steps:
                self._on_step(metrics)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def cut_after(path: Path, *, last_step: int) -> None:
    """Keep the whole lines of steps up to `last_step`: a run that was killed may have left later ones, and a half."""
    if not path.exists():
        return
    text = path.read_bytes()
    kept = [line for line in text.splitlines(keepends=True) if line.endswith(b"\n") and _step(line) <= last_step]
    if b"".join(kept) != text:
        with atomic_write(path) as file:
            file.writelines(kept)


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoard:
    """TensorBoard's own files; what it holds of steps that will be redone is purged."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, steps: Sequence[StepMetrics]) -> None:
        for metrics in steps:
            values = {
                name: getattr(metrics, name) for name in ("loss", "grad_norm", "lr", "samples_per_s", "peak_bytes")
            }
            values |= {f"evaluation/{name}": value for name, value in (metrics.evaluation or {}).items()}
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
