"""Specs that come with the package, so that planning a model imports no torch.

A catalogue model without one is traced when it is asked for.

python -m shardwise.trace.ship     traces them again
"""

from collections.abc import Collection
from pathlib import Path

from shardwise.spec.model import ModelSpec
from shardwise.spec.store import load_spec

FOLDER = Path(__file__).parent / "ready"


def ready_spec(name: str, *, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec | None:
    """Return the shipped spec of a model, or None; with the traces of `ways` (computes in, recompute), or all."""
    path = FOLDER / f"{name}.json"
    return load_spec(path, ways=ways) if path.is_file() else None
