"""Cached files in the user's cache folder: `$XDG_CACHE_HOME/shardwise`, or `~/.cache/shardwise`.

A file's name is the hash of everything that its content depends on, so a file is never out of date.
`SHARDWISE_CACHE=off` turns the cache off.
"""

import hashlib
import os
from pathlib import Path

from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, read_text

SWITCH = "SHARDWISE_CACHE"
# Files of each kind.
_MOST_FILES = 100
_MOST_BYTES = 2**28


def cache_folder() -> Path | None:
    """Return the folder; None if the cache is off, or the user has no home folder."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base, "shardwise")
    try:
        return Path.home() / ".cache" / "shardwise"
    except RuntimeError:
        return None


def cached_text(kind: str, key: str) -> str | None:
    """Return the text that was kept under `key`; None if there is none, or it cannot be read."""
    path = _path(kind, key)
    try:
        return read_text(path, most_bytes=_MOST_BYTES) if path is not None else None
    except UnreadableFile:
        # The caller makes it again.
        return None


def keep_text(kind: str, key: str, text: str) -> None:
    """Keep a text under `key`; an error leaves no partial file."""
    path = _path(kind, key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
        _drop_oldest(path.parent)
    except OSError:
        # With a full disk or a read-only home the text is only made again the next time.
        return


def _drop_oldest(folder: Path) -> None:
    """Remove the oldest files: other versions of Shardwise leave files that no key finds."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _path(kind: str, key: str) -> Path | None:
    folder = cache_folder()
    return folder / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" if folder is not None else None
