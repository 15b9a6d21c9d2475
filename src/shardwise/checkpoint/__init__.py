"""Checkpoints of a training: sharded, atomic, asynchronous, without pickle, loadable under any other plan."""

from shardwise.checkpoint.checkpoints import Checkpoints, Loaded, SavedCheckpoint, Saving, open_checkpoint
from shardwise.checkpoint.storage import CheckpointReader
from shardwise.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Checkpoints",
    "Loaded",
    "SavedCheckpoint",
    "Saving",
    "open_checkpoint",
]
