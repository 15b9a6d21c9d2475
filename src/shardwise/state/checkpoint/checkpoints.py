"""Save and load a training: the model, the optimizer, and its progress. This is the interface for users.

save ──▶ each rank's slices, as boxes of named tensors ──▶ copied to the host ──▶ written in the background (saving.py)
load ◀── boxes of the slices that each rank holds now ◀── read, as far as they overlap, by the planner of
         torch.distributed.checkpoint

Each rank plans by itself what it writes and reads; ranks exchange no plans.
"""

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as planned_load
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError
from shardwise.base.files.object_path import Location, ObjectPath, location
from shardwise.state.checkpoint.contents import Loading, StateSnapshot, loading, snapshot
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.folder import checkpoints_in
from shardwise.state.checkpoint.manifest import Manifest, read_manifest, verify_files
from shardwise.state.checkpoint.ranks import Ranks, one_line
from shardwise.state.checkpoint.saving import write_checkpoint
from shardwise.state.checkpoint.staging import Staging
from shardwise.state.checkpoint.storage import CheckpointReader
from shardwise.state.checkpoint.typed import from_json

if TYPE_CHECKING:
    # Models import this package, and need no engine.
    from shardwise.engine.prepared.average import EMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save that has begun. Training waited for it for `stall_seconds`; this rank writes `num_bytes`."""

    step: int
    stall_seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk, or in an object store."""

    path: Location
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.contents.step

    @property
    def num_ranks(self) -> int:
        return self.manifest.contents.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The progress of the training. `own` is None if the number of ranks has changed since it was saved."""

    step: int
    progress: dict[str, Any]
    own: dict[str, Any] | None


class Checkpoints:
    """The checkpoints of one training, in one folder that all ranks see: a path, or a URL such as s3://bucket/run.

    All methods are collective over the job; without a process group, this process is the job. `on_saved` is called on
    rank 0 with the step of each checkpoint when it is on disk, in the thread that writes. `tell` shows a line to the
    user, on rank 0. `disk` replaces the real file system, for tests.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | ObjectPath,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        on_saved: Callable[[int], None] | None = None,
        tell: Callable[[str], None] = warnings.warn,
        disk: Disk | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep = {keep}: at least one checkpoint must be kept")
        self.folder = location(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        self._disk = disk or Disk()
        self._on_saved = on_saved
        self._tell = tell
        # Names of checkpoints that `latest` read and found damaged.
        self._damaged: set[str] = set()
        self._staging = Staging()
        self._ranks: Ranks | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        progress: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        ema: "EMA | None" = None,
        finite_only: bool = False,
    ) -> Saving:
        """Save this state. Asynchronous: returns when it is copied, and writes in the background.

        progress      numbers, strings, lists, dicts; the same on every rank
        own           the same kinds, and tensors, of this rank alone: random states, for example
        ema           an average of the parameters, to be saved too
        finite_only   refuse parameters with a NaN or Inf. Otherwise they are saved, and the last checkpoint without
                      any is kept however many follow

        A save waits for the previous one. The next call raises an error that occurred in the background.
        """
        begun = time.perf_counter()
        self.wait()
        ranks = self._together()

        def take() -> StateSnapshot:
            now = snapshot(model, optimizer, step=step, progress=progress or {}, own=own or {}, ranks=ranks, ema=ema)
            return now.copied(self._staging) if self._asynchronous else now

        taken = ranks.together(take)
        _check_same_step(step, ranks=ranks)
        for rank, name in ranks.failures(taken.nonfinite).items() if finite_only else ():
            raise CheckpointError(f"step {step} is not saved: on rank {rank} {name} holds a NaN or Inf")
        if self._asynchronous:
            name = f"checkpoint of step {step}"
            self._thread = threading.Thread(target=self._write_noting, args=(taken, ranks), name=name)
            self._thread.start()
        else:
            self._write(taken, ranks)
        return Saving(step=step, stall_seconds=time.perf_counter() - begun, num_bytes=taken.num_bytes)

    def wait(self) -> None:
        """Wait until the pending save is on disk, under its final name."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest good checkpoint: its manifest is there, and all files match their checksums.

        The ranks share the reading. A line names a damaged checkpoint, and the previous one is tried.
        """
        self.wait()
        ranks = self._together()
        names = ranks.by_first(lambda: [path.name for path in checkpoints_in(self.folder)])
        for name in reversed(names):
            path = self.folder / name
            problems = ranks.failures(_problem(path, ranks=ranks))
            if not problems:
                return SavedCheckpoint(path=path, manifest=read_manifest(path))
            for line in (line for line, is_damage in problems.values() if not is_damage):
                # The one before it would be the wrong one to resume from.
                raise CheckpointError(f"the newest checkpoint cannot be read: {line}")
            self._damaged.add(name)
            if ranks.index == 0:
                self._tell(f"checkpoint passed over: {next(iter(problems.values()))[0]}")
        return None

    def load(
        self,
        saved: SavedCheckpoint,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        ema: "EMA | None" = None,
    ) -> Loaded:
        """Fill the model, the optimizer and the average, under any plan, engine and number of ranks."""
        self.wait()
        ranks = self._together()
        manifest = saved.manifest
        load = ranks.together(lambda: loading(model, optimizer, manifest=manifest, ranks=ranks, ema=ema))
        if optimizer is not None and not load.has_optimizer and ranks.index == 0:
            self._tell(f"{saved.path} holds weights only: the optimizer starts afresh")
        for rank, line in ranks.failures(_read(saved, load)).items():
            raise CheckpointError(f"{saved.path} was not loaded, or only in part: rank {rank}: {line}")
        load.finish()
        progress = from_json(manifest.contents.progress)
        return Loaded(step=saved.step, progress=progress, own=load.own)

    def close(self) -> None:
        """Wait for the pending save, then release the ranks' process group."""
        try:
            self.wait()
        finally:
            if self._ranks is not None:
                self._ranks.leave()
                self._ranks = None

    def _together(self) -> Ranks:
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks()
        return self._ranks

    def _write_noting(self, taken: StateSnapshot, ranks: Ranks) -> None:
        try:
            self._write(taken, ranks)
        except CheckpointError as error:
            self._failure = error

    def _write(self, taken: StateSnapshot, ranks: Ranks) -> None:
        write_checkpoint(
            taken,
            folder=self.folder,
            ranks=ranks,
            keep=self._keep,
            disk=self._disk,
            damaged=frozenset(self._damaged),
            on_saved=self._on_saved,
            tell=self._tell,
        )


def open_checkpoint(path: str | PathLike[str] | ObjectPath) -> SavedCheckpoint:
    """Open one checkpoint by its folder, for `Checkpoints.load`; raise if it is damaged. Not collective."""
    place = location(path)
    manifest = read_manifest(place)
    verify_files(place, manifest.files)
    return SavedCheckpoint(path=place, manifest=manifest)


def _problem(path: Location, *, ranks: Ranks) -> tuple[str, bool] | None:
    """Describe what is wrong with this rank's part of the files, and whether that is damage; None if they are good."""
    try:
        files = sorted(read_manifest(path).files.items())
        verify_files(path, dict(files[ranks.index :: ranks.count]))
    except CheckpointError as error:
        # Of a disk an error is damage; a store that did not answer may have a good file.
        unread = isinstance(path, ObjectPath) and isinstance(_first_cause(error), OSError)
        return str(error), not unread
    return None


def _first_cause(error: BaseException) -> BaseException:
    """Return the error that led to this one, by way of others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _check_same_step(step: int, *, ranks: Ranks) -> None:
    first = ranks.by_first(lambda: step)
    if ranks.any(step != first):
        steps = ", ".join(map(str, ranks.each(lambda: step)))
        raise CheckpointError(f"ranks save different steps: {steps}")


def _read(saved: SavedCheckpoint, load: Loading) -> str | None:
    """Fill the targets of this rank; return what went wrong, in one line."""
    try:
        with warnings.catch_warnings():
            # That this is planned in one process is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            planned_load(
                load.targets,
                storage_reader=CheckpointReader(saved.path, manifest=saved.manifest, wanted=load.wanted),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except CheckpointException as error:
        ((failure, _),) = error.failures.values()
        return one_line(failure)
    return None
