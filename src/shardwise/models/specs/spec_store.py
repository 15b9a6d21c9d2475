"""The specs of one model: shipped, by laws of an architecture, kept from an earlier trace, or traced now.

Catalogue models are shipped with the package (ready/), so that planning them imports no torch.

python -m shardwise.models.specs.ship     traces them again
"""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base.vocabulary.collection import without_collection
from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import GPTShape, TokenShape
from shardwise.models.specs.architecture import architecture_for
from shardwise.models.specs.kept import keep_spec, kept_spec, spec_key
from shardwise.models.specs.spec_request import SpecRequest, Way
from shardwise.models.specs.states_only import states_only
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import COMPILED, FP8_WAYS
from shardwise.program.spec.store import load_spec

if TYPE_CHECKING:
    from shardwise.models.tasks import Task


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


Trace = Callable[[SpecRequest, Collection[Way]], ModelSpec]


class SpecStore:
    """Finds specs, and keeps them: a trace takes seconds, and the planner's caches know a spec by its identity.

    task    the model that was made to be traced
    """

    def __init__(self) -> None:
        self.task: Task | None = None
        self._found: dict[tuple[SpecRequest, frozenset[Way]], ModelSpec] = {}
        self._traced: dict[tuple[SpecRequest, Way | None], ModelSpec] = {}

    def find(self, request: SpecRequest, *, ways: Collection[Way] = (), trace: Trace) -> ModelSpec:
        """Return the spec with the traces of `ways`; units that a shipped spec lacks compiled count as uncompiled."""
        key = request, frozenset(ways)
        if key not in self._found:
            self._found[key] = self._with(request, ways=sorted(key[1]), trace=trace)
        return self._found[key]

    def _with(self, request: SpecRequest, *, ways: list[Way], trace: Trace) -> ModelSpec:
        if request.kind == "params":
            return states_only(request.reference)
        shipped = shipped_spec(request, ways=ways)
        found = shipped or _by_laws(request, ways=ways) or self._live(request, None, trace=trace)
        missing = [(way, how) for way, how in ways if found.trace(computes_in=way, recompute=how) is None]
        if shipped is not None and all(how in COMPILED.values() for way, how in missing if way not in FP8_WAYS):
            missing = [one for one in missing if one[0] in FP8_WAYS]
        for one in missing:
            traced = self._live(request, one, trace=trace)
            found = replace(traced, seq=found.seq, traces=(*found.traces, *traced.traces))
        return found

    def _live(self, request: SpecRequest, way: Way | None, *, trace: Trace) -> ModelSpec:
        """Return the spec with one trace or none, from a new trace or from the cache."""
        if (request, way) not in self._traced:
            ways = [] if way is None else [way]
            key = spec_key(request, ways=ways)
            traced = kept_spec(key)
            if traced is None:
                with _nothing_collected():
                    traced = trace(request, ways)
                keep_spec(key, traced)
            self._traced[request, way] = replace(traced, seq=traced.seq or request.seq)
        return self._traced[request, way]


def _by_laws(request: SpecRequest, *, ways: list[Way]) -> ModelSpec | None:
    laws = architecture_for(request)
    return laws.spec(name=request.reference, ways=ways) if laws is not None else None


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Turn the garbage collector off.

    The objects of torch's import stay alive, and collecting among them again and again takes a second. Tensors of a
    trace must also be freed with their last reference, not at the time of a collection.
    """
    with without_collection():
        try:
            yield
        finally:
            gc.freeze()
