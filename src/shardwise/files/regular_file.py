"""Files opened only if they are regular: never a FIFO that blocks, a device that does not end, or a link elsewhere."""

import errno
import os
import stat
from pathlib import Path


def open_to_read(path: Path) -> int:
    """The descriptor of a regular file. A link to one is followed; anything else is an OSError, at once."""
    # A FIFO without a writer would block in open: with O_NONBLOCK it does not, and a regular file does not care.
    return _checked(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """What a regular file holds. One that is larger is an OSError before any of it is read: it is none of ours."""
    with os.fdopen(open_to_read(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            raise OSError(errno.EFBIG, f"is larger than {num_bytes:,} bytes", str(path))
        return file.read()


def open_to_append(path: Path) -> int:
    """The descriptor of a regular file, made if missing, to read and append. A link, symbolic or hard, is refused.

    What is written here is ours: through a link it would land in somebody else's file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link", str(path)) from error
        raise
    _checked(descriptor)
    if os.fstat(descriptor).st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "is a hard link to another file", str(path))
    return descriptor


def _checked(descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file")
    return descriptor
