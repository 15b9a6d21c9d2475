"""Shardwise's own models, so that every claim can be checked without a download. They contain no parallelism."""
