"""Reads JSON, TOML and YAML from files of any source: regular files of a limited size, nesting and number of values.

A file that a user or a stranger can hand over is read here, or by `read_at_most`;
tests/unit/base/files/test_data_file.py looks for other readers.

It opens regular files only: never a FIFO that blocks, an endless device, or a link to another place.
"""

import errno
import json
import math
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.object_path import Location, ObjectPath

if TYPE_CHECKING:
    from yaml import Node


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


MOST_CONFIG_BYTES = 4 * 2**20
# Our own files are at most ten levels deep. Much deeper ones exhaust the stack of whatever walks over them.
_MOST_LEVELS = 100
# With aliases a short YAML file can stand for more values than any reader comes to the end of.
_MOST_YAML_VALUES = 100_000
# YAML reads 1:1:1… as one number in base 60, in a time that grows with the square of its length.
_MOST_DIGITS = 400


class UnreadableFile(ShardwiseError):  # noqa: N818
    """A file cannot be read, or does not hold what it should; the caller adds its name. `is_missing`: there is none."""

    @property
    def is_missing(self) -> bool:
        return isinstance(self.__cause__, FileNotFoundError)


def read_content(path: str | os.PathLike[str] | ObjectPath, *, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most that size."""
    try:
        return read_at_most(path if isinstance(path, ObjectPath) else Path(path), most_bytes)
    except OSError as error:
        raise UnreadableFile(f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # a name with a zero byte
        raise UnreadableFile(f"cannot be read ({error})") from error


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_CONFIG_BYTES) -> str:
    """Return the content of a regular file of at most that size, which must be text in UTF-8."""
    try:
        return read_content(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not text in UTF-8 (byte {error.start})") from error


def read_json(
    path: str | os.PathLike[str] | ObjectPath, *, most_bytes: int = MOST_CONFIG_BYTES, finite: bool = True
) -> Any:
    """Return the value in a JSON file; see `parse_json`."""
    return parse_json(read_content(path, most_bytes=most_bytes), finite=finite)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a TOML file."""
    return parse_toml(read_text(path))


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the value in a YAML file. Its numbers may be inf or nan: whoever reads a setting says whether it may."""
    return _parse_yaml(read_text(path))


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value in a JSON text. `finite`: raise an error for NaN and Infinity, which Python's parser accepts."""
    try:
        found = json.loads(text)
        check_values(found, finite=finite)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"is not JSON ({_why(error)})") from error
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text. Its floats may be inf or nan: the form of a key says whether it may."""
    try:
        found = tomllib.loads(text.replace("\r\n", "\n"))
        check_values(found, finite=False)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"is not TOML: {_why(error)}") from error
    return found


def check_values(found: Any, *, finite: bool, most_values: float = math.inf) -> None:
    """Raise ValueError for lists and mappings that are nested too deeply or hold too many values.

    An object that stands in several places counts in each of them.
    """
    level, num_values = [found], 0
    for _ in range(_MOST_LEVELS):
        if finite and any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise ValueError("it holds NaN or Infinity, and its numbers must be finite")
        holders = [value for value in level if isinstance(value, list | tuple | Mapping)]
        if not holders:
            return
        num_values += sum(map(len, holders))
        if num_values > most_values:
            raise ValueError(f"it stands for more than {most_values:,} values, by aliases: write them out")
        level = [part for value in holders for part in (value.values() if isinstance(value, Mapping) else value)]
    raise ValueError(f"nested too deeply: more than {_MOST_LEVELS} levels")


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            # Before values are made: merging (`<<`) multiplies them as aliases do.
            _count(node, counted={})
            found = loader.construct_document(node)
        finally:
            loader.dispose()
        check_values(found, finite=False, most_values=_MOST_YAML_VALUES)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UnreadableFile(f"is not YAML ({_why(error)})") from error
    return found


def _count(node: "Node", *, counted: dict[int, int]) -> int:
    """Return the number of values that a node stands for, aliases and merges written out; raise if there are too many.

    A node inside of itself counts as endless.
    """
    if isinstance(node.value, str):
        if node.tag.endswith((":int", ":float")) and len(node.value) > _MOST_DIGITS:
            raise ValueError(f"it holds a number of more than {_MOST_DIGITS} digits")
        return 1
    if id(node) not in counted:
        counted[id(node)] = _MOST_YAML_VALUES
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        counted[id(node)] = 1 + sum(_count(part, counted=counted) for part in parts)
    if counted[id(node)] > _MOST_YAML_VALUES:
        raise ValueError(f"it stands for more than {_MOST_YAML_VALUES:,} values, by aliases: write them out")
    return counted[id(node)]


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested too deeply: more than {_MOST_LEVELS} levels"
    return " ".join(str(error).split())[:200]
