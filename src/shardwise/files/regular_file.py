"""Open regular files only: never a FIFO that blocks, an endless device, or a link to another place."""

import errno
import os
import stat
from pathlib import Path

from shardwise.files.object_path import Location, ObjectPath


def open_to_read(path: Path) -> int:
    """Return the descriptor of a regular file. A link to one is followed; anything else raises OSError at once."""
    # Without O_NONBLOCK, open blocks on a FIFO without a writer. A regular file ignores the flag.
    return _checked(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def read_at_most(path: Location, num_bytes: int) -> bytes:
    """Return the content of a regular file. A larger file is not ours: it raises OSError before any of it is read."""
    if isinstance(path, ObjectPath):
        size = path.stat().st_size
        if size > num_bytes:
            raise OSError(errno.EFBIG, f"is larger than {num_bytes:,} bytes", str(path))
        return path.read_range(0, size)
    with os.fdopen(open_to_read(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            raise OSError(errno.EFBIG, f"is larger than {num_bytes:,} bytes", str(path))
        content = file.read(num_bytes + 1)
        if len(content) > num_bytes:  # files of /proc have the size 0
            raise OSError(errno.EFBIG, f"is larger than {num_bytes:,} bytes", str(path))
        return content


def open_to_append(path: Path) -> int:
    """Return the descriptor of a regular file, to read and append; create it if it is missing.

    A symbolic or hard link raises OSError: text written through it would end up in a file that is not ours.
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
