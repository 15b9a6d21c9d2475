"""Checkpoints on disk or in an object store. The names that users import are in `shardwise.checkpoint`."""
