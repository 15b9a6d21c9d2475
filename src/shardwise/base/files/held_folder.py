"""Private folders that processes hold while they use them; the kernel releases them however the process ends."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def holding(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder within the block, as the only process; the lock is a flock on the folder itself.

    wait   wait for another holder, and do without the lock where the file system has none: nobody else gets one there

    Raises FileNotFoundError if the folder is gone, or was removed meanwhile; without `wait` BlockingIOError if another
    process holds it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if not wait:
                raise
        if not os.path.samestat(os.fstat(descriptor), path.lstat()):
            raise FileNotFoundError(str(path))
        yield
    finally:
        os.close(descriptor)


def is_private(path: Path) -> bool:
    """Return whether it is a folder of this user that nobody else can read."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
