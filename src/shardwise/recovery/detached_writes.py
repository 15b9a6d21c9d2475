"""Has snapshots written to disk as checkpoints by processes of their own (disk_writer.py), while training continues.

The ranks keep the generation that is written until all of them know that it is on disk.
"""

from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.step_flags import StepFlags
from shardwise.files.object_path import Location
from shardwise.recovery.disk_writer import DiskWriter

_WRITTEN = "snapshot is on disk"


class DetachedWrites:
    """One generation at a time. Every method is collective."""

    def __init__(self, *, ranks: Ranks, flags: StepFlags, memory: Path, start: str) -> None:
        self._ranks, self._flags = ranks, flags
        self._memory, self._start = memory, start
        # Makes the writer of a step, if one was asked for.
        self._make: Callable[[int], DiskWriter] | None = None
        self._on_saved: Callable[[int], None] | None = None
        self._writer: DiskWriter | None = None
        # The step of the generation that is kept, and of the last one that is on disk; -1 if there is none.
        self._kept, self._written = -1, -1
        flags.register(_WRITTEN, lambda: self._written)

    def ask(self, folder: Location, *, keep: int, finite_only: bool, on_saved: Callable[[int], None] | None) -> None:
        """Write the next snapshot that is taken, unless one is being written."""
        self._on_saved = on_saved
        self._make = lambda step: DiskWriter(
            self._memory, start=self._start, step=step, folder=folder, keep=keep, finite_only=finite_only
        )

    def taken(self, step: int) -> None:
        """Keep the snapshot of this step if one was asked for."""
        if self._make is not None and self._kept < 0:
            self._kept = step

    def keeps(self, step: int) -> bool:
        """Return whether the snapshot of this step must not be overwritten."""
        return self._kept >= 0 and self._kept == step

    def follow(self, whole: int) -> None:
        """Begin to write the generation that is kept, once it is whole; release it when all know that it is on disk."""
        if self._kept < 0:
            return
        if self._flags.agreed[_WRITTEN] >= self._kept:
            self._kept, self._make = -1, None
        elif self._ranks.index == 0:
            if self._writer is None and self._written < self._kept <= whole and self._make is not None:
                self._writer = self._make(self._kept)
            self._end_writer(wait=False)

    def wait(self) -> None:
        """Return when no snapshot is being written; one that is not whole yet is not written."""
        self._make = None
        self._ranks.together(lambda: self._end_writer(wait=True))
        self._kept = -1

    def _end_writer(self, *, wait: bool) -> None:
        if self._writer is not None and self._writer.is_done(wait=wait):
            self._written, self._writer = self._writer.step, None
            if self._on_saved is not None:
                self._on_saved(self._written)
