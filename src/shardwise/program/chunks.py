"""The chunks in which states in host memory pass through the device."""

CHUNK_ELEMENTS = 2**25
"""Elements of one chunk, at most."""

NUM_SLOTS = 2
"""Chunks that are on the device at once: one comes in while the other goes out."""
