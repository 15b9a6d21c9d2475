"""The metrics of steps: `metrics.jsonl`, one line per step, and TensorBoard.

Each rank has its part of a step's loss on its device. Reading it in every step would make the CPU wait for the GPU. So
the parts of several steps stay on the device, and are summed over ranks and read together: every log_every steps,
before an evaluation and before a checkpoint.
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

from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, open_to_append, parse_json, read_content
from shardwise.comm.groups.agreement import exchange
from shardwise.training.config.config_section import InvalidConfig

# A line takes about 500 bytes.
_MOST_BYTES = 2**34
_SCALARS = ("loss", "grad_norm", "lr", "samples_per_s", "peak_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    loss            the mean over all samples of the step, on all ranks
    grad_norm       before clipping; None if train.clip_norm is 0
    num_samples     of this step; position: samples of the current epoch seen after it
    seconds         and samples_per_s, tokens_per_s: means over the steps that were read together, without evaluation
                    and saving, on num_ranks ranks
    peak_bytes      the most that this rank has held: GPU memory (cuda) or memory of its process (rss), see peak_of
    evaluation      metrics after this step, if it was evaluated
    compile_seconds share of torch.compile in this step on this rank; None if it compiled nothing
    replayed_share  share of the calls of units that were replays of graphs; None without unit graphs
    host_bytes      memory of this rank's snapshots, and of the copies that it keeps for others; None without snapshots
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
    replayed_share: float | None = None
    host_bytes: Mapping[str, int] | None = None

    def to_json(self) -> str:
        """Return one line; JSON has no NaN and no Inf, so they become null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step whose loss and norm are still on the device."""

    step: int
    lr: float
    num_samples: int
    num_tokens: int | None
    epoch: int
    position: int
    loss: Tensor
    grad_norm: Tensor | None
    compile_seconds: float | None = None
    replayed_share: float | None = None


class Window:
    """The steps since the CPU last waited for the device."""

    def __init__(self, *, device: torch.device, num_ranks: int) -> None:
        self._device = device
        self._num_ranks = num_ranks
        self._taken: list[Taken] = []
        # The steps of the last read whose loss was NaN or Inf on this rank.
        self._nonfinite: list[int] = []
        self._started = time.perf_counter()

    def add(self, taken: Taken) -> None:
        self._taken.append(taken)

    def read(self) -> list[StepMetrics]:
        """Return the metrics of all steps and empty the window. Collective; waits for the device.

        Losses are summed in float64, where sums of a few float32 are exact: the order of ranks does not matter.
        """
        taken, self._taken = self._taken, []
        if not taken:
            return []
        own = torch.stack([step.loss.double() for step in taken])
        losses = own.clone()
        dist.all_reduce(losses)
        means = [loss / self._num_ranks for loss in losses.tolist()]
        self._nonfinite = []
        if not all(map(math.isfinite, means)):
            self._nonfinite = [
                step.step for step, loss in zip(taken, own.tolist(), strict=True) if not math.isfinite(loss)
            ]
        norms = [None if step.grad_norm is None else step.grad_norm.item() for step in taken]
        seconds = time.perf_counter() - self._started
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
                samples_per_s=sum(one.num_samples for one in taken) / seconds,
                tokens_per_s=num_tokens / seconds if num_tokens else None,
                peak_bytes=peak_bytes,
                peak_of=peak_of,
                num_ranks=self._num_ranks,
                compile_seconds=step.compile_seconds,
                replayed_share=step.replayed_share,
            )
            for step, loss, norm in zip(taken, means, norms, strict=True)
        ]

    def ranks_of_nonfinite(self, step: int) -> list[int]:
        """Return the ranks on which the loss of this step of the last read was NaN or Inf. Collective."""
        return [rank for rank, steps in enumerate(exchange(self._nonfinite)) if step in steps]

    def restart_clock(self) -> None:
        """Leave the time since the last read out of the next steps."""
        self._started = time.perf_counter()


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Return the peak bytes of this rank, and of which memory: GPU allocations, or its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss"


class Writer(Protocol):
    """Takes the metrics of one or more steps at a time, in order, each step once."""

    def write(self, steps: Sequence[StepMetrics]) -> None: ...

    def close(self) -> None: ...


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


class JsonLines:
    """`metrics.jsonl`: each step exactly once, also after a restart, which redoes the steps after `last_step`."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        try:
            # First, to refuse a link: only this run's own file may be cut or written. Cutting replaces the file.
            os.close(open_to_append(path))
            _cut_after(path, last_step=last_step)
            self._file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(f"{path}: cannot be written ({error.strerror}): move it away") from error
        except UnreadableFile as error:
            raise InvalidConfig(f"{path}: {error}: move it away") from error

    def write(self, steps: Sequence[StepMetrics]) -> None:
        self._file.writelines(metrics.to_json() + "\n" for metrics in steps)
        # On disk before the checkpoint, after which these steps are not redone.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_after(path: Path, *, last_step: int) -> None:
    """Keep the complete lines of steps up to `last_step`: a killed run may have left later ones, and half a line."""
    text = read_content(path, most_bytes=_MOST_BYTES)
    kept = [line for line in text.splitlines(keepends=True) if line.endswith(b"\n") and _step(line) <= last_step]
    if b"".join(kept) != text:
        with atomic_write(path) as file:
            file.writelines(kept)


def _step(line: bytes) -> float:
    try:
        return int(parse_json(line)["step"])
    except (UnreadableFile, ValueError, KeyError, TypeError):
        return math.inf


class TensorBoard:
    """TensorBoard's own files; the entries of steps that are redone are purged."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, steps: Sequence[StepMetrics]) -> None:
        for metrics in steps:
            values = {name: getattr(metrics, name) for name in _SCALARS}
            values |= {f"evaluation/{name}": value for name, value in (metrics.evaluation or {}).items()}
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
