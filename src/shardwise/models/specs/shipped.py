"""Specs that come with the package, so that planning a model imports no torch.

A catalogue model without one is traced when it is asked for.

python -m shardwise.models.specs.ship     traces them again
"""

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from shardwise.spec.model import ModelSpec
from shardwise.spec.store import load_spec

FOLDER = Path(__file__).parent / "ready"


def ready_spec(name: str, *, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec | None:
    """Return the shipped spec of a model, or None; with the traces of `ways` (computes in, recompute), or all."""
    return _loaded(name, None) if ways is None else _kept(name, frozenset(ways))


def _loaded(name: str, ways: Collection[tuple[str, str]] | None) -> ModelSpec | None:
    path = FOLDER / f"{name}.json"
    return load_spec(path, ways=ways) if path.is_file() else None


# Specs are keys of the planner's caches. Two that are equal but not the same object are compared field by field at
# every look, which takes longer than the planning.
_kept = lru_cache(maxsize=32)(_loaded)
