"""Steps that run out of memory: explained, undone on every rank, and run again under a smaller plan."""
