"""The folder that holds checkpoints, and the order of effects that makes each appear and disappear atomically.

    step-00000100/, step-00000200/, step-00000200.1/     checkpoints; the last one is of a step that existed already
    .saving-…/                                            being written, or left by a crash
    .removing-…/                                          being removed, or left by a crash

One job at a time saves into a folder: the next save removes what a crash has left.
"""

import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from shardwise.checkpoint.disk import Disk
from shardwise.checkpoint.manifest import FILE_NAME, Manifest, StoredFile, read_manifest
from shardwise.checkpoint.tensor_file import TensorEntry, write_tensors
from shardwise.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SAVING, _REMOVING = ".saving-", ".removing-"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first, without checking whether they are good."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        # It is missing, a file, or not readable.
        return []
    found = []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def begin(folder: Path, *, step: int, disk: Disk) -> Path:
    """Make the folder in which a checkpoint is written. Its name is unique to this save, so that two never mix."""
    disk.make_folder(folder)
    sweep(folder, disk=disk)
    saving = folder / f"{_SAVING}step-{step:08}-{secrets.token_hex(8)}"
    disk.make_folder(saving)
    return saving


def sweep(folder: Path, *, disk: Disk) -> None:
    """Remove what a crash left of saves and removals, as far as possible. Only the job that holds the folder may."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith((_SAVING, _REMOVING)) and path.is_dir():
            _remove(path, disk=disk)


def discard(saving: Path, *, disk: Disk) -> bool:
    """Remove what a failed save has written, so that a full disk has room again; return whether that worked."""
    return not saving.is_dir() or _remove(saving, disk=disk) is None


def write_file(path: Path, entries: Mapping[str, TensorEntry], tensors: Iterable[Tensor], *, disk: Disk) -> StoredFile:
    """Write a safetensors file; it is on disk when this returns."""
    with disk.create(path) as file:
        summed = _Summed(file, disk=disk)
        write_tensors(summed, entries, tensors, metadata={"format": "pt"})
        disk.sync_file(file)
    return StoredFile(num_bytes=summed.num_bytes, crc32=summed.crc32)


class _Summed:
    """A file that counts the bytes written into it and keeps their checksum."""

    def __init__(self, file: BinaryIO, *, disk: Disk) -> None:
        self._file = file
        self._disk = disk
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: memoryview, /) -> None:
        self._disk.write(self._file, data)
        self.num_bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def commit(saving: Path, manifest: Manifest, *, disk: Disk) -> Path:
    """Write the manifest after all files, then rename the folder: from there on the checkpoint exists."""
    with disk.create(saving / FILE_NAME) as file:
        disk.write(file, memoryview(manifest.to_bytes()))
        disk.sync_file(file)
    disk.sync_folder(saving)
    target = _free_name(saving.parent, step=manifest.contents.step)
    disk.rename(saving, target)
    disk.sync_folder(saving.parent)
    return target


def _free_name(folder: Path, *, step: int) -> Path:
    """Return a name that is not taken: a checkpoint of that name may be the last good one."""
    path = folder / f"step-{step:08}"
    number = 0
    while path.exists():
        number += 1
        path = folder / f"step-{step:08}.{number}"
    return path


def prune(folder: Path, *, keep: int, newest: Path, disk: Disk, damaged: Collection[str] = ()) -> list[str]:
    """Remove all but the last `keep`, and the last one with finite weights. Damaged ones do not count, and stay.

    `damaged` are the names of checkpoints that do not match their checksums; of others only the lengths are checked.
    Return a line for each checkpoint of which something could not be removed: the newest one is on disk all the same.
    """
    found = [path for path in checkpoints_in(folder) if path != newest and path.name not in damaged]
    finite = {path: manifest.contents.finite for path in found if (manifest := _whole(path)) is not None}
    others = list(finite)
    kept: Path | None = None
    if not read_manifest(newest).contents.finite:
        # A user returns to the last one with finite weights.
        kept = next((path for path in reversed(others) if finite[path]), None)
    lines = []
    for path in others[: max(0, len(others) - (keep - 1))]:
        if path == kept:
            continue
        removing = folder / f"{_REMOVING}{path.name}-{secrets.token_hex(8)}"
        try:
            disk.rename(path, removing)
            # Before the first file is removed: after a crash, a folder with files missing must not have its old name.
            disk.sync_folder(folder)
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


def _remove(path: Path, *, disk: Disk) -> OSError | None:
    """Remove a folder and the files in it; return the first error. Folders in it are not ours, and stay."""
    failed: OSError | None = None
    try:
        if path.is_symlink():
            # Keep its target: a user may have linked a checkpoint of another run.
            disk.remove_file(path)
            return None
        # The manifest first: without it the folder is no checkpoint.
        for file in sorted(path.iterdir(), key=lambda file: (file.name != FILE_NAME, file.name)):
            try:
                disk.remove_file(file)
            except OSError as error:
                failed = failed or error
        if failed is None:
            disk.remove_folder(path)
    except OSError as error:
        failed = error
    return failed


def _whole(path: Path) -> Manifest | None:
    """Return the manifest if it is good and the files have their lengths; the tensors are not read."""
    try:
        manifest = read_manifest(path)
        lengths = ((path / name).stat().st_size == file.num_bytes for name, file in manifest.files.items())
        return manifest if all(lengths) else None
    except (CheckpointError, OSError):
        return None
