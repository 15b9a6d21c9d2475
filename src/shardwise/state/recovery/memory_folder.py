"""The private folder on /dev/shm that holds a job's snapshots on one node. It outlives the ranks, under any launcher.

    /dev/shm/shardwise-KEY/        mode 0700; the random key is kept by the run folder or by the job's store
        node                       a random name: ranks that read the same one share this memory
        owner.json                 the process that started the ranks
        rank-00000.lock            locked by rank 0 while it lives
        START.0.00000.state …      data and records of generations (generation.py)

A job that ends well removes its folder. What any other job leaves is freed when the next one starts on the node.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.base.errors import CheckpointError
from shardwise.base.files.data_file import read_at_most
from shardwise.base.files.held_folder import holding, is_private
from shardwise.comm.job.job_environment import memory_root

_PREFIX = "shardwise-"
_KEY = re.compile(r"[0-9a-f]{32}")
_NODE, _OWNER = "node", "owner.json"
# Ranks of a job that is ending may live a little longer.
_LOCK_SECONDS = 10.0
# A launcher that was started again needs time to reach its ranks: until then, its snapshots are not leftovers.
_GRACE_SECONDS = 600.0


def new_key() -> str:
    return secrets.token_hex(16)


def is_key(text: object) -> bool:
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


class MemoryFolder:
    """One rank's access to the snapshots of its job on this node. Raises if another job uses them.

    node   the name of this node's memory; ranks with the same name see the same files
    """

    def __init__(self, key: str, *, rank: int) -> None:
        self.path = memory_root() / f"{_PREFIX}{key}"
        try:
            self._lock = self._enter(f"rank-{rank:05}.lock")
        except BlockingIOError:
            raise CheckpointError(
                f"rank {rank} of another job uses the snapshots of this run on this node: wait for that job to end, "
                "or choose another folder"
            ) from None
        self.node = self._shared_name()
        _write(self.path / _OWNER, json.dumps({"parent": os.getppid(), "began": _began(os.getppid())}))

    def _enter(self, name: str) -> int:
        """Return the lock of this rank, in the folder, which is made if it is missing."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            _make_private(self.path)
            try:
                # Nobody may decide meanwhile that the folder is a leftover. Gone: it was one, and a new one is made.
                with suppress(FileNotFoundError), holding(self.path, wait=True):
                    return _locked(self.path / name)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _shared_name(self) -> str:
        """Return the name in the folder; the first rank to come writes it."""
        draft = self.path / f".node-{os.getpid()}"
        draft.write_text(secrets.token_hex(8))
        with suppress(FileExistsError):
            os.link(draft, self.path / _NODE)
        draft.unlink()
        return (self.path / _NODE).read_text()

    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(entry.name for entry in os.scandir(self.path))

    def remove(self, *names: str) -> None:
        for name in names:
            # Ranks of one node may remove the same file.
            (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, text: str) -> None:
        """Write a file that is there as a whole, or not at all."""
        _write(self.path / name, text)

    def release(self) -> None:
        """Give up the lock; the files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def free(self) -> None:
        """Remove the folder. Ranks of one node may call it at the same time."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def free_memory(key: str) -> None:
    """Remove the snapshots of a job whose ranks have ended."""
    path = memory_root() / f"{_PREFIX}{key}"
    if is_private(path):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def snapshots_of_launch() -> Iterator[str]:
    """Yield a key for a job without a folder that keeps one; at the end nobody knows it, so its snapshots go."""
    key = new_key()
    try:
        yield key
    finally:
        free_memory(key)


def free_leftovers(*, own_key: str) -> tuple[int, int]:
    """Remove the folders of jobs that are gone; return how many, and their bytes."""
    count = num_bytes = 0
    for path in sorted(memory_root().glob(f"{_PREFIX}*")):
        key = path.name.removeprefix(_PREFIX)
        if key == own_key or not is_key(key) or not is_private(path):
            continue
        # A file that vanishes while it is looked at: another job frees the folder, or works in it.
        with suppress(OSError), holding(path, wait=False):
            if _is_abandoned(path):
                held_bytes = sum(file.stat().st_blocks * 512 for file in path.iterdir())
                shutil.rmtree(path)
                count, num_bytes = count + 1, num_bytes + held_bytes
    return count, num_bytes


def _is_abandoned(path: Path) -> bool:
    """Return whether no rank of the job lives, nor what started them, and nobody wrote for a while."""
    newest = max((file.stat().st_mtime for file in [path, *path.iterdir()]), default=0.0)
    if time.time() - newest < _GRACE_SECONDS:
        return False
    for lock in path.glob("rank-*.lock"):
        try:
            os.close(_locked(lock))
        except BlockingIOError:
            return False
    try:
        owner = json.loads(read_at_most(path / _OWNER, 4096))
        return _began(int(owner["parent"])) != int(owner["began"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _began(process: int) -> int:
    """Return when a process began, in ticks since the machine's start; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    # The name, in parentheses, may contain anything.
    return int(text.rpartition(")")[2].split()[19])


def _locked(path: Path) -> int:
    """Return the descriptor of a lock that this process holds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Not flock, which the data-loader processes of a killed rank would keep.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _make_private(path: Path) -> None:
    """Make the folder, or check that the one that is there is ours alone."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise CheckpointError(f"{path.parent}: no folder for snapshots can be made ({error.strerror})") from error
    if not is_private(path) and os.path.lexists(path):
        raise CheckpointError(f"{path}: is not a folder that this user alone can read; remove it")


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    # Created with the folder's privacy; in memory there is nothing to sync.
    draft.write_text(text)
    draft.rename(path)
