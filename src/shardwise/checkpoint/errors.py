"""What can be wrong with a checkpoint."""

from shardwise.errors import ShardwiseError


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written or read, is damaged, or does not fit the model."""
