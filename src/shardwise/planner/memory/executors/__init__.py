"""The operations of a step program on bytes: one executor per engine."""
