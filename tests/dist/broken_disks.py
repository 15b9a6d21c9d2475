"""Disks that fail in the middle of a save: at one effect, with the process, or when they are full."""

import errno
import os
import signal
from pathlib import Path
from typing import BinaryIO

from shardwise.state.checkpoint.disk import Disk


class FailingDisk(Disk):
    """Counts its effects; the `at`-th is an error, or the end of the process."""

    def __init__(self, *, at: int = 0, kill: bool = False) -> None:
        self.count = 0
        self._at = at
        self._kill = kill

    def _effect(self) -> None:
        self.count += 1
        if self.count == self._at:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "Input/output error")

    def create(self, path: Path) -> BinaryIO:
        self._effect()
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self._effect()
        super().write(file, data)

    def sync_file(self, file: BinaryIO) -> None:
        self._effect()
        super().sync_file(file)

    def sync_folder(self, path: Path) -> None:
        self._effect()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._effect()
        super().rename(old, new)


class FullDisk(Disk):
    """Takes `room_bytes`, and of the write that would be more only what fits. `written`: all that was asked of it."""

    def __init__(self, *, room_bytes: int = 2**62) -> None:
        self.written = 0
        self._room_bytes = room_bytes

    def write(self, file: BinaryIO, data: memoryview) -> None:
        fits = max(0, self._room_bytes - self.written)
        self.written += data.nbytes
        super().write(file, data.cast("B")[:fits])
        if data.nbytes > fits:
            raise OSError(errno.ENOSPC, "No space left on device")
