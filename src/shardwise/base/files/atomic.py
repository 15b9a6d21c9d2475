"""Atomic writing: a file is replaced as a whole, or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing, which replaces `path` when the block ends without an error.

    It is written next to `path` (a rename is atomic only within one file system), flushed to the
    disk, then renamed. An error removes it and leaves the previous file at `path`.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to the user; a plan or a token file is an ordinary file.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    # No call only reads it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
