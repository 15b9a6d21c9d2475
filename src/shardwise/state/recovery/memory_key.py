"""The random key that names a job's snapshots: kept in a folder that all starts see, or by what starts the ranks again.

folder given     FOLDER/snapshots.json
our launcher     an environment variable of its ranks
torchrun         the agent's store, which outlives the ranks
"""

import json
import os
from pathlib import Path

from shardwise.base.errors import CheckpointError, InvalidJob
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.base.torch_internals.torch_private import TCPStore
from shardwise.comm.job.job_environment import SNAPSHOTS, rendezvous_of, start_of
from shardwise.state.recovery.memory_folder import free_memory, is_key, new_key

FILE_NAME = "snapshots.json"
_IN_STORE = "shardwise/snapshots"


def key_in(folder: Path) -> str | None:
    """Return the key that a folder keeps; None if it has none, or if the file is not ours."""
    try:
        key = read_json(folder / FILE_NAME, most_bytes=4096)["key"]
    except (UnreadableFile, KeyError, TypeError):
        return None
    return key if is_key(key) else None


def key_for(folder: Path) -> str:
    """Return the key that a folder keeps; without one, make it."""
    key = key_in(folder)
    if key is None:
        key = new_key()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / FILE_NAME) as file:
                file.write(json.dumps({"key": key}).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    return key


def forget(folder: Path) -> None:
    """Free the snapshots of a folder's job on this node, and forget their key."""
    key = key_in(folder)
    if key is not None:
        free_memory(key)
        (folder / FILE_NAME).unlink(missing_ok=True)


def key_of_job() -> str:
    """Return the key that outlives the ranks of this job without a folder."""
    given = os.environ.get(SNAPSHOTS)
    if is_key(given):
        assert given is not None
        return given
    start = start_of(os.environ)
    if start.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meeting = rendezvous_of(start, variables=os.environ)
        store = TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False)
        return store.compare_set(_IN_STORE, "", new_key()).decode()
    raise InvalidJob(
        "protect without folder= needs a launcher that starts ranks again (shardwise or torchrun): give it a folder "
        "that all ranks see, which keeps the key of the snapshots"
    )
