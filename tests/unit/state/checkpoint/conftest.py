"""Fixtures of object stores."""

from object_server import object_server, s3, store

__all__ = ["object_server", "s3", "store"]
