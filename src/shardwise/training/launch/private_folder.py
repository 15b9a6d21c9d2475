"""The launcher's private folder on a local disk, for what it exchanges with its ranks. No torch here.

    TMPDIR/shardwise-launch-KEY/     mode 0700, with a random key; held by the launcher as long as it lives

A launcher that is killed leaves its folder. Nobody holds it any more, so the next launcher of the same user removes it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.base.files.held_folder import holding, is_private
from shardwise.state.recovery.memory_folder import is_key, new_key

_PREFIX = "shardwise-launch-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make the folder, and remove it after the block. First, remove those of launchers that were killed."""
    root = Path(tempfile.gettempdir())
    _remove_leftovers(root)
    with ExitStack() as held:
        while True:
            path = root / f"{_PREFIX}{new_key()}"
            path.mkdir(mode=0o700)
            # Another launcher that starts may have removed it just now, before it was held.
            with suppress(FileNotFoundError):
                held.enter_context(holding(path, wait=True))
                break
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        if is_key(path.name.removeprefix(_PREFIX)) and is_private(path):
            # Its launcher lives, another one removes it, or the file system has no locks.
            with suppress(OSError), holding(path, wait=False):
                shutil.rmtree(path)
