"""Every effect that a save has on the file system, one method each.

A save is a sequence of these, so a test can count them, and let the k-th fail, for every k.
"""

import os
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The real one."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file, unbuffered: what `write` returned from has been handed to the system."""
        return open(path, "xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        while data:
            data = data[file.write(data) :]

    def sync_file(self, file: BinaryIO) -> None:
        """Return when the file's content would survive a loss of power."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """The same for the names in a folder: a file that is synced in a folder that is not may have no name."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()
