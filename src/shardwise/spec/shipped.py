"""Specs that come with the package, one per catalogue model, so that planning it imports no torch.

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
