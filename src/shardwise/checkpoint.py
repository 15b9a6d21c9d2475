"""Checkpoints of a training: sharded, atomic, asynchronous, without pickle, loadable under any other plan."""

from shardwise.base.errors import CheckpointError
from shardwise.state.checkpoint.checkpoints import Checkpoints, Loaded, SavedCheckpoint, Saving, open_checkpoint
from shardwise.state.checkpoint.storage import CheckpointReader

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Checkpoints",
    "Loaded",
    "SavedCheckpoint",
    "Saving",
    "open_checkpoint",
]
