"""Every effect that a save has on the file system or an object store, one method each.

A save is a sequence of these calls, so that a test can count them and make the k-th one fail, for every k.
"""

import os
from pathlib import Path
from typing import BinaryIO

from shardwise.base.files.object_path import Location, ObjectPath
from shardwise.base.files.upload import Upload, upload_to

NewFile = BinaryIO | Upload


class Disk:
    """The real file system, and the object stores that fsspec reaches."""

    def make_folder(self, path: Location) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Location) -> NewFile:
        """Create a file, unbuffered: when `write` returns, the system has the data. An upload sends them in parts."""
        return upload_to(path) if isinstance(path, ObjectPath) else open(path, "xb", buffering=0)

    def write(self, file: NewFile, data: memoryview) -> None:
        while data:
            data = data[file.write(data) :]

    def sync_file(self, file: NewFile) -> None:
        """Return when the content of the file would survive a power failure; an upload is completed."""
        if isinstance(file, Upload):
            file.complete()
        else:
            os.fsync(file.fileno())

    def discard_file(self, file: NewFile) -> None:
        """Abort an upload that failed. What was written of a file stays until its folder is removed."""
        if isinstance(file, Upload):
            file.discard()

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder would survive it: a synced file may lose its name without this."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove_file(self, path: Location) -> None:
        path.unlink()

    def remove_folder(self, path: Location) -> None:
        path.rmdir()

    def abort_uploads(self, path: Location) -> None:
        """Abort uploads that nobody completes, of objects whose names begin with this one."""
        if isinstance(path, ObjectPath):
            path.abort_uploads()
