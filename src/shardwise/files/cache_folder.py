"""Files that can be made again, in the user's cache folder: `$XDG_CACHE_HOME/shardwise`, or `~/.cache/shardwise`.

A file's name is the hash of all that its content follows from, so that none is ever out of date by its key.
`SHARDWISE_CACHE=off` keeps and reads none.
"""

import hashlib
import os
from pathlib import Path

from shardwise.files.atomic import atomic_write

SWITCH = "SHARDWISE_CACHE"
# Of each kind.
_MOST_FILES = 100


def cache_folder() -> Path | None:
    """Where files are kept; None where the user wants none, or has no home."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    # As its specification says, a relative path is ignored.
    if os.path.isabs(base):
        return Path(base, "shardwise")
    try:
        return Path.home() / ".cache" / "shardwise"
    except RuntimeError:
        return None


def cached_text(kind: str, key: str) -> str | None:
    """What was kept under `key`; None where nothing was, or it cannot be read."""
    path = _path(kind, key)
    try:
        return path.read_text(encoding="utf-8") if path is not None else None
    except (OSError, ValueError):
        # It is made again.
        return None


def keep_text(kind: str, key: str, text: str) -> None:
    """Keep a text under `key`; the file appears whole or not at all."""
    path = _path(kind, key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
        _drop_oldest(path.parent)
    except OSError:
        # A full disk or a home that is read-only costs the time to make it again, and nothing else.
        return


def _drop_oldest(folder: Path) -> None:
    """What nobody asked for in a long time goes: other versions leave files that no key finds any more."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _path(kind: str, key: str) -> Path | None:
    folder = cache_folder()
    return folder / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" if folder is not None else None
