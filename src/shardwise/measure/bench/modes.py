"""Modes in which the steps of an engine run, by the end of its name: "torch-captured" is torch's engine, captured.

eager      operation by operation
captured   CUDA graphs: of units in our engine, of the whole step in others
compiled   the same, with each unit compiled by torch.compile
"""

MODES = ("eager", "captured", "compiled")


def is_ours(engine: str) -> bool:
    """Return whether the steps are eager steps of our engine."""
    return engine == "shardwise"


def without_mode(engine: str) -> str:
    """Return the engine: "torch" for "torch-captured"; ours is "shardwise"."""
    bare = engine.removesuffix(mode_of(engine)).removesuffix("-")
    return bare or "shardwise"


def mode_of(engine: str) -> str:
    return next((mode for mode in MODES[1:] if engine.endswith(mode)), MODES[0])
