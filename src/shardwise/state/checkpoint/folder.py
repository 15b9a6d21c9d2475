"""The folder that holds checkpoints, and the order of effects that makes each appear and disappear atomically.

    step-00000100/, step-00000200/, step-00000200.1/     checkpoints; the last one is of a step that existed already
    .saving-…/                                            being written, or left by a crash
    .removing-…/                                          being removed, or left by a crash

An object store has no rename that takes effect at once. There a checkpoint has its name from the beginning, and exists
while it has a manifest, which is written last and removed first:

    step-00000100/ with manifest.json                     a checkpoint
    step-00000100/ without                                being written or removed, or left by a crash

One job at a time saves into a folder: the next save removes what a crash has left.
"""

import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.files.object_path import Location, ObjectPath
from shardwise.state.checkpoint.disk import Disk, NewFile
from shardwise.state.checkpoint.manifest import FILE_NAME, Manifest, StoredFile, read_manifest
from shardwise.state.checkpoint.tensor_file import TensorEntry, write_tensors

# A name in a folder is of the same kind as the folder.
Place = TypeVar("Place", Path, ObjectPath)

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SAVING, _REMOVING = ".saving-", ".removing-"


def checkpoints_in(folder: Location) -> list[Location]:
    """Return the checkpoints of a folder, oldest first, without checking whether they are good."""
    try:
        paths: list[Location] = list(folder.iterdir())
    except OSError as error:
        if isinstance(folder, ObjectPath):
            # Not none: a store that does not answer would make a training start at step 0.
            raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from error
        # It is missing, a file, or not readable.
        return []
    found = []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match and ((path / FILE_NAME).is_file() if isinstance(path, ObjectPath) else path.is_dir()):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def step_of(path: Location) -> int:
    """Return the step of a checkpoint by its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def begin(folder: Location, *, step: int, disk: Disk) -> Location:
    """Make the folder in which a checkpoint is written. Its name is unique to this save, so that two never mix."""
    disk.make_folder(folder)
    if isinstance(folder, ObjectPath):
        # Chosen before the sweep: a rank of a job that died may still be uploading under a name that is swept.
        saving: Location = _free_name(folder, step=step)
        sweep(folder, disk=disk)
    else:
        sweep(folder, disk=disk)
        saving = folder / f"{_SAVING}step-{step:08}-{secrets.token_hex(8)}"
    disk.make_folder(saving)
    return saving


def sweep(folder: Location, *, disk: Disk) -> None:
    """Remove what a crash left of saves and removals, as far as possible. Only the job that holds the folder may."""
    if isinstance(folder, ObjectPath):
        for name in sorted(folder.sizes()):
            if _NAME.fullmatch(name) and not (folder / name / FILE_NAME).is_file():
                _remove(folder / name, disk=disk)
        with suppress(OSError):
            disk.abort_uploads(folder / "step-")
        return
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith((_SAVING, _REMOVING)) and path.is_dir():
            _remove(path, disk=disk)


def discard(saving: Location, *, disk: Disk) -> bool:
    """Remove what a failed save has written, so that a full disk has room again; return whether that worked."""
    # Of ranks that died; the others have aborted their own.
    with suppress(OSError):
        disk.abort_uploads(saving)
    try:
        return not saving.is_dir() or _remove(saving, disk=disk) is None
    except OSError:
        return False


def write_file(
    path: Location, entries: Mapping[str, TensorEntry], tensors: Iterable[Tensor], *, disk: Disk
) -> StoredFile:
    """Write a safetensors file; it is on disk when this returns."""
    with _created(path, disk=disk) as file:
        summed = _Summed(file, disk=disk)
        write_tensors(summed, entries, tensors, metadata={"format": "pt"})
    return StoredFile(num_bytes=summed.num_bytes, crc32=summed.crc32)


@contextmanager
def _created(path: Location, *, disk: Disk) -> Iterator[NewFile]:
    """Create a file; it is synced at the end, or discarded after an error."""
    file = disk.create(path)
    try:
        yield file
        disk.sync_file(file)
    except BaseException:
        disk.discard_file(file)
        raise
    finally:
        file.close()


class _Summed:
    """A file that counts the bytes written into it and keeps their checksum."""

    def __init__(self, file: NewFile, *, disk: Disk) -> None:
        self._file = file
        self._disk = disk
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: memoryview, /) -> None:
        self._disk.write(self._file, data)
        self.num_bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def commit(saving: Location, manifest: Manifest, *, disk: Disk) -> Location:
    """Write the manifest after all files, then rename the folder: from there on the checkpoint exists."""
    with _created(saving / FILE_NAME, disk=disk) as file:
        disk.write(file, memoryview(manifest.to_bytes()))
    if isinstance(saving, ObjectPath):
        return saving
    disk.sync_folder(saving)
    target = _free_name(saving.parent, step=manifest.contents.step)
    disk.rename(saving, target)
    disk.sync_folder(saving.parent)
    return target


def _free_name(folder: Place, *, step: int) -> Place:
    """Return a name that is not taken: a checkpoint of that name may be the last good one."""
    path = folder / f"step-{step:08}"
    number = 0
    while path.exists():
        number += 1
        path = folder / f"step-{step:08}.{number}"
    return path


def prune(folder: Location, *, keep: int, newest: Location, disk: Disk, damaged: Collection[str] = ()) -> list[str]:
    """Remove all but the last `keep`, and the last one with finite weights. Damaged ones do not count, and stay.

    `damaged` are the names of checkpoints that do not match their checksums; of others only the lengths are checked.
    Return a line for each checkpoint of which something could not be removed: the newest one is on disk all the same.
    """
    found = [path for path in checkpoints_in(folder) if path != newest and path.name not in damaged]
    finite = {path: manifest.contents.finite for path in found if (manifest := _whole(path)) is not None}
    others = list(finite)
    kept: Location | None = None
    if not read_manifest(newest).contents.finite:
        # A user returns to the last one with finite weights.
        kept = next((path for path in reversed(others) if finite[path]), None)
    lines = []
    for path in others[: max(0, len(others) - (keep - 1))]:
        if path == kept:
            continue
        try:
            removing = _renamed(path, disk=disk)
        except OSError as error:
            lines.append(f"the old checkpoint {path} was not removed ({error.strerror})")
            continue
        failed = _remove(removing, disk=disk)
        if failed is not None:
            what = failed.filename or removing
            lines.append(
                f"of the old checkpoint {path.name}, {what} was not removed ({failed.strerror}): remove it yourself"
            )
    return lines


def _renamed(path: Location, *, disk: Disk) -> Location:
    """Return a checkpoint under the name that it has while it is removed. In a store it keeps its own."""
    if isinstance(path, ObjectPath):
        return path
    removing = path.parent / f"{_REMOVING}{path.name}-{secrets.token_hex(8)}"
    disk.rename(path, removing)
    # Before the first file is removed: after a crash, a folder with files missing must not have its old name.
    disk.sync_folder(path.parent)
    return removing


def _remove(path: Location, *, disk: Disk) -> OSError | None:
    """Remove a folder and the files in it; return the first error. Folders in it are not ours, and stay."""
    failed: OSError | None = None
    try:
        if path.is_symlink():
            # Keep its target: a user may have linked a checkpoint of another run.
            disk.remove_file(path)
            return None
        # The manifest first: without it the folder is no checkpoint.
        files: list[Location] = list(path.iterdir())
        for file in sorted(files, key=lambda file: (file.name != FILE_NAME, file.name)):
            try:
                disk.remove_file(file)
            except OSError as error:
                failed = failed or error
        if failed is None:
            disk.remove_folder(path)
    except OSError as error:
        failed = error
    return failed


def _whole(path: Location) -> Manifest | None:
    """Return the manifest if it is good and the files have their lengths; the tensors are not read."""
    try:
        manifest = read_manifest(path)
        # One listing of a store, where there may be thousands of files.
        sizes = path.sizes() if isinstance(path, ObjectPath) else None
        lengths = (
            (sizes.get(name) if sizes is not None else (path / name).stat().st_size) == file.num_bytes
            for name, file in manifest.files.items()
        )
        return manifest if all(lengths) else None
    except (CheckpointError, OSError):
        return None
