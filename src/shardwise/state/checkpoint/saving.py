"""Writes a checkpoint: every rank its file, then rank 0 the manifest.

    .saving-step-00000100-4f1c…/        made by rank 0
        rank-00000.safetensors …        each written and synced by its rank
        manifest.json                   written by rank 0 when the files of all ranks are on disk
    step-00000100/                      the same folder, renamed: from here on the checkpoint exists

So a folder with the name of a checkpoint is complete; what a crash leaves has another name. In an object store the
files go into step-00000100/ at once, and the manifest makes it a checkpoint (folder.py). Between two of these stages
the ranks compare one number: whether one of them has failed.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from shardwise.base.errors import CheckpointError, DiskFailed
from shardwise.base.files.object_path import Location, location
from shardwise.state.checkpoint.contents import StateSnapshot
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.folder import begin, commit, discard, prune
from shardwise.state.checkpoint.parts import CheckpointPart, write_part
from shardwise.state.checkpoint.ranks import Ranks, one_line

T = TypeVar("T")

# Errors that the user has to fix: another attempt would fail in the same way.
_NOT_THE_DISK = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What went wrong on a rank. `ends_process`: it is an error that no program handles."""

    line: str
    by_disk: bool
    ends_process: bool


def write_checkpoint(
    taken: StateSnapshot,
    *,
    folder: Location,
    ranks: Ranks,
    keep: int,
    disk: Disk,
    damaged: Collection[str] = (),
    on_saved: Callable[[int], None] | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> None:
    """Write this rank's part of a checkpoint into `folder`; on rank 0, remove all but the last `keep`. Collective.

    damaged    the names of checkpoints that do not count among those that are kept
    on_saved   is called on rank 0 when the checkpoint is on disk, before older ones are removed
    tell       shows a line on rank 0: what of older ones could not be removed
    """
    stages = _Stages(ranks, step=taken.contents.step, disk=disk)

    def finish(whole: CheckpointPart | None) -> None:
        if whole is None:
            return
        path = stages.commit(whole)
        if on_saved is not None:
            on_saved(taken.contents.step)
        for line in prune(folder, keep=keep, newest=path, disk=disk, damaged=damaged):
            tell(line)

    try:
        stages.begin(folder)
        part = stages.run(
            lambda: write_part(taken.pieces, contents=taken.contents, rank=ranks.index, folder=stages.folder, disk=disk)
        )
        whole = ranks.merge_on_first(part, CheckpointPart.merged)
        stages.run(lambda: finish(whole))
    except RuntimeError as error:
        # Another rank is gone, so that the exchange with it failed.
        raise CheckpointError(
            f"the checkpoint of step {taken.contents.step} was not written: {one_line(error)}"
        ) from error


class _Stages:
    """The stages of one save. Each ends on all ranks before the next begins; none begins after one has failed."""

    def __init__(self, ranks: Ranks, *, step: int, disk: Disk) -> None:
        self._ranks, self._step, self._disk = ranks, step, disk
        # The folder of the save, until it is a checkpoint.
        self._saving: Location | None = None

    @property
    def folder(self) -> Location:
        assert self._saving is not None
        return self._saving

    def begin(self, folder: Location) -> None:
        """Make the folder in which the ranks write."""
        first = self._ranks.index == 0
        made = self.run(lambda: str(begin(folder, step=self._step, disk=self._disk)) if first else "")
        self._saving = location(self._ranks.by_first(lambda: made))

    def commit(self, whole: CheckpointPart) -> Location:
        """Make the folder a checkpoint: what fails later no longer removes it. On rank 0."""
        path = commit(self.folder, whole.manifest(), disk=self._disk)
        self._saving = None
        return path

    def run(self, stage: Callable[[], T]) -> T:
        """Run a stage on every rank; raise on all if it fails on one."""
        failure: BaseException | None = None
        try:
            result = stage()
        except BaseException as error:
            failure = error
        failures = self._ranks.failures(None if failure is None else _describe(failure))
        if failures:
            raise self._not_written(failures) from failure
        return result

    def _not_written(self, failures: dict[int, _Failure]) -> CheckpointError:
        """Remove what was written, on rank 0, and return the error to raise."""
        rank, first = next(iter(failures.items()))
        line = f"the checkpoint of step {self._step} was not written: rank {rank}: {first.line}"
        ends = any(failure.ends_process for failure in failures.values())
        saving = self._saving if self._ranks.index == 0 and not ends else None
        if saving is not None and not discard(saving, disk=self._disk):
            line += "; its half-written folder could not be removed"
        return DiskFailed(line) if first.by_disk else CheckpointError(line)


def _describe(error: BaseException) -> _Failure:
    return _Failure(
        line=one_line(error),
        by_disk=isinstance(error, OSError) and not isinstance(error, _NOT_THE_DISK),
        ends_process=not isinstance(error, Exception),
    )
