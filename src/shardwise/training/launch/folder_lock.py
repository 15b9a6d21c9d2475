"""Allows one job at a time in a run folder. No torch here.

Our launcher, or rank 0 under another launcher, holds a flock on RUN/.lock, which the kernel releases however the
process ends.
"""

import errno
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.data_file import open_to_append

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class InvalidFolder(ShardwiseError):  # noqa: N818
    """A run folder that cannot be written, or is in use by another job."""


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Lock the run folder, which is made if missing. Raises InvalidFolder if another job holds it.

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
        yield


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
