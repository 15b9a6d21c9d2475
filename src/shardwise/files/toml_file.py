"""Read a TOML file that a user wrote."""

import os
import tomllib
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.files.regular_file import read_at_most

_MOST_BYTES = 4 * 2**20


class UnreadableFile(ShardwiseError):  # noqa: N818
    """A file is missing or not TOML; the caller adds its name."""


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of the file; a mistake in it raises an error of one line."""
    try:
        return tomllib.loads(read_at_most(Path(path), _MOST_BYTES).decode().replace("\r\n", "\n"))
    except OSError as error:
        raise UnreadableFile(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not text in UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise UnreadableFile(f"is not TOML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UnreadableFile("is not TOML: nested too deeply") from error
