"""Allows one job at a time in a run folder, and removes what a killed launcher has left. No torch here.

Our launcher, or rank 0 under another launcher, holds a flock on RUN/.lock, which the kernel releases however the
process ends. Our launcher writes the path of its private folder into the lock file, so that the next one can remove
what a killed launcher has left. Anyone may have written that path, so the private folder must confirm it: it belongs to
this user, is not a link, and names this very lock (device and inode) in its `lock` file.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from shardwise.errors import ShardwiseError
from shardwise.files.regular_file import open_to_append

# The prefix of private folders, and the file in each that names its lock.
_PRIVATE = "shardwise-"
_OWNER = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class InvalidFolder(ShardwiseError):  # noqa: N818
    """A run folder that cannot be written, or is in use by another job."""


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[TextIO]:
    """Lock the run folder, made if missing, and yield the lock file. Raises InvalidFolder if another job holds it.

    wait_seconds   how long to wait for a holder that is exiting: the worker processes of a killed rank keep its lock
                   for up to 5 s
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_to_append(path), "a+")
    except OSError as error:
        raise _unusable(folder, error) from error
    with file:
        try:
            _acquire(file, wait_seconds=wait_seconds)
        except BlockingIOError:
            raise InvalidFolder(f"another job is writing into {folder}: wait for it, or choose another --run") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _unusable(folder, error) from error
            warnings.warn(
                f"{folder}: its file system has no locks ({error.strerror}); run only one job in it at a time",
                stacklevel=4,
            )
        yield file


def _acquire(file: TextIO, *, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _unusable(folder: Path, error: OSError) -> InvalidFolder:
    what = f"{error.filename}: {error.strerror}" if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror
    if isinstance(error, FileExistsError):
        what = os.strerror(errno.ENOTDIR)
    return InvalidFolder(f"{folder}: cannot be written ({what}): choose another --run")


@contextmanager
def private_folder(lock: TextIO) -> Iterator[Path]:
    """Make a private folder for the holder of `lock`, after removing one that a killed holder left."""
    status = os.fstat(lock.fileno())
    name = f"{status.st_dev}:{status.st_ino}"
    lock.seek(0)
    _remove_left(lock.read(), owner=name)
    lock.truncate(0)
    with tempfile.TemporaryDirectory(prefix=_PRIVATE) as private:
        Path(private, _OWNER).write_text(name)
        lock.write(private)
        lock.flush()
        try:
            yield Path(private)
        finally:
            lock.truncate(0)


def _remove_left(text: str, *, owner: str) -> None:
    left = Path(text)
    if not left.is_absolute() or not left.name.startswith(_PRIVATE):
        return
    with suppress(OSError, ValueError):
        status = left.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        mark = left / _OWNER
        if ours and stat.S_ISREG(mark.lstat().st_mode) and mark.read_text() == owner:
            shutil.rmtree(left)
