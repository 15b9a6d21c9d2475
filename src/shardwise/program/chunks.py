"""What passes between device and host memory, in parts, so that the device holds little of it."""

CHUNK_ELEMENTS = 2**24
"""Elements of one chunk, at most."""

NUM_SLOTS = 3
"""Chunks that are on the device at once: one comes in, one is updated, one goes out."""
