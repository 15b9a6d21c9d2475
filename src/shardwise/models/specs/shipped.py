"""Specs that come with the package, so that planning a model imports no torch.

A catalogue model without one is traced when it is asked for.

python -m shardwise.models.specs.ship     traces them again
"""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import GPTShape, TokenShape
from shardwise.models.specs.spec_request import SpecRequest, Way
from shardwise.spec.model import ModelSpec
from shardwise.spec.store import load_spec

FOLDER = Path(__file__).parent / "ready"


def ready_spec(name: str, *, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec | None:
    """Return the shipped spec of a model, or None; with the traces of `ways` (computes in, recompute), or all."""
    return _loaded(name, None) if ways is None else _kept(name, frozenset(ways))


def is_shipped(request: SpecRequest) -> bool:
    """Return whether the package has the spec, and it holds for this sequence length, image size and kind of device."""
    if not request.is_plain or request.kind:
        return False
    shape = shape_of(request.reference)
    if isinstance(shape, TokenShape):
        # A longer GPT has more positions, which are parameters.
        longest = shape.max_seq if isinstance(shape, GPTShape) else 2**40
        holds = request.image is None and 1 <= (request.seq or 1) <= longest
    else:
        holds = request.seq is None and request.image in (None, shape.image_size)
    return holds and (FOLDER / f"{request.reference}.json").is_file()


def shipped_spec(request: SpecRequest, *, ways: Collection[Way]) -> ModelSpec | None:
    """Return the spec that the package has, with those of the traces that it has; None if there is none."""
    spec = ready_spec(request.reference, ways=ways) if is_shipped(request) else None
    return replace(spec, seq=request.seq or spec.seq) if spec is not None else None


def _loaded(name: str, ways: Collection[tuple[str, str]] | None) -> ModelSpec | None:
    path = FOLDER / f"{name}.json"
    return load_spec(path, ways=ways) if path.is_file() else None


# Specs are keys of the planner's caches. Two that are equal but not the same object are compared field by field at
# every look, which takes longer than the planning.
_kept = lru_cache(maxsize=32)(_loaded)
