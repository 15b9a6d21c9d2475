"""A forward and a backward become triggers at units: the engine, the trace and the profile listen to the same hooks."""
