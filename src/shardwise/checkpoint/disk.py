"""Every effect that a save has on the file system, one method each.

A save is a sequence of these calls, so that a test can count them and make the k-th one fail, for every k.
"""

import os
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Create a file, unbuffered: when `write` returns, the system has the data."""
        return open(path, "xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        while data:
            data = data[file.write(data) :]

    def sync_file(self, file: BinaryIO) -> None:
        """Return when the content of the file would survive a power failure."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder would survive it: a synced file may lose its name without this."""
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
