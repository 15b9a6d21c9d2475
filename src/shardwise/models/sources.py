"""MODEL of the command line → a spec. torch is imported only for models that have to be traced.

gpt2-124m                  a catalogue model: its spec comes with the package
params:60b                 a number of parameters; nothing else is known of the model
python:FILE.py:function    your own Task
hf:DIR (or hf:DIR/config.json, hf:Qwen/Qwen3-8B), timm:NAME, torchvision:NAME    models of other libraries
                           (tasks/foreign.py)
"""

import gc
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.models.adaptation import Adaptation
from shardwise.models.catalogue import shape_of
from shardwise.models.hub_cache import config_folder
from shardwise.models.shapes import GPTShape, LlamaShape, TokenShape
from shardwise.models.specs.architecture import Architecture, architecture_of
from shardwise.models.specs.kept import keep_spec, kept_spec, spec_key
from shardwise.models.specs.shipped import ready_spec
from shardwise.models.transformers_shapes import TRANSFORMERS_SHAPES
from shardwise.plan import Plan
from shardwise.plan.policy import AUTO_UNITS
from shardwise.planner.memory.peak import computes_in
from shardwise.planner.ways import fp8_traces, traced_ways
from shardwise.program.fp8_layers import fp8_weight_names
from shardwise.spec import ROOT, ModelSpec, TensorSpec, UnitSpec
from shardwise.spec.losses import LEAN, USUAL, with_loss
from shardwise.spec.step import COMPILED, FP8_WAYS
from shardwise.vocabulary.collection import without_collection
from shardwise.vocabulary.heads import HEADS

if TYPE_CHECKING:
    from shardwise.models.tasks import Task

Way = tuple[str, str]
"""(dtype that computes, recompute or its name in COMPILED)."""

FOREIGN = ("hf:", "timm:", "torchvision:")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# A model of which only its size is known still needs units to shard: equal blocks, and a little at the root.
_NUM_BLOCKS = 40
_ROOT_PART = 50
# Models with rotary positions have no longest sample of their own.
_LONGEST = 131_072


class Source:
    """One model, by its reference or as a task, whose spec grows by the traces that plans need.

    kernels   those of a cuda or cpu device
    adaptation   LoRA or QLoRA instead of training all parameters
    tile      modules that compute in tiles of so many tokens, as in a plan
    fp8       weights that are multiplied in fp8, as in a plan
    units     the policy by which the model is cut, as in a plan; only `auto` has traces that come with the package
    loss      of a model that reads tokens (spec/losses.py): lean, which `shardwise train` uses, for catalogue models;
              for others their own, which is the usual one
    """

    def __init__(
        self,
        model: "Task | str",
        *,
        seq: int | None = None,
        image: int | None = None,
        kernels: str = "cuda",
        loss: str = LEAN,
        adaptation: Adaptation | None = None,
        tile: Mapping[str, int] | None = None,
        fp8: frozenset[str] = frozenset(),
        units: str = AUTO_UNITS,
        while_tracing: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    ) -> None:
        self.reference = model if isinstance(model, str) else type(model.model).__name__
        self._seq, self._image, self._kernels, self._adaptation = seq, image, kernels, adaptation
        if adaptation is not None and self.reference.startswith(("params:", "python:")):
            raise InvalidModel(f"{self.reference}: --lora is for models by name; a python: task adds its own adapters")
        self._while_tracing = while_tracing
        self._tile, self._fp8, self._units = tile or {}, fp8, units
        # The same model in other units, with tiled modules, or with layers in fp8.
        self._changed: dict[object, Source] = {}
        self._task: Task | None = None if isinstance(model, str) else model
        # A task of the caller's is traced in any case: it has no reference by which it could be found again.
        self._is_given = self._task is not None
        # Whether the package's own spec holds for this sequence length and image size.
        self._is_shipped = False
        # The laws by which an hf: model needs no trace, if there are any.
        self._architecture: Architecture | None = None
        # Traces that this spec does not have: compiled units, which then count as uncompiled.
        self._left_out: set[Way] = set()
        self._spec = self._first_spec()
        self.loss = loss
        # The spec, and the same with the loss that is asked for.
        self._with_loss: tuple[ModelSpec, ModelSpec] | None = None

    def spec_for(self, plan: Plan) -> ModelSpec:
        """Return the spec, with the traces that `plan` needs."""
        if self.reference.startswith("params:"):
            if plan.units != AUTO_UNITS:
                raise InvalidPlan(f"units = {plan.units!r}: {self.reference} has no modules to cut")
            return self._spec
        if plan.units != self._units:
            return self._changed_to(units=plan.units).spec_for(plan)
        if plan.tile and not self._tile:
            return self._changed_to(units=self._units, tile=plan.tile, fp8=self._fp8).spec_for(plan)
        layers = fp8_weight_names(self._spec, plan=plan)
        if layers and not self._fp8:
            return self._changed_to(units=self._units, tile=self._tile, fp8=layers).spec_for(plan)
        way = computes_in(self._spec, plan=plan)
        ways = [(way, how) for how in traced_ways(self._spec, plan=plan)] + fp8_traces(self._spec, plan=plan)
        missing = [(way, how) for way, how in ways if self._spec.trace(computes_in=way, recompute=how) is None]
        if set(missing) - self._left_out:
            self._spec = self._with(missing)
        if any(pattern.rpartition(".")[2] in HEADS for pattern in self._tile):
            # The loss is computed in the tiles of the head, whatever the loop would do.
            return self._spec
        if self._with_loss is None or self._with_loss[0] is not self._spec:
            self._with_loss = self._spec, with_loss(self._spec, loss=self.loss, is_lean=self.has_lean_loss)
        return self._with_loss[1]

    def _changed_to(
        self, *, units: str, tile: Mapping[str, int] | None = None, fp8: frozenset[str] = frozenset()
    ) -> "Source":
        """Return the same model in other units, or with modules that are tiled or multiply in fp8."""
        key = units, frozenset((tile or {}).items()), fp8
        if key not in self._changed:
            self._changed[key] = Source(
                self._task if self._is_given and self._task is not None else self.reference,
                seq=self._seq,
                image=self._image,
                kernels=self._kernels,
                loss=self.loss,
                adaptation=self._adaptation,
                tile=tile,
                fp8=fp8,
                units=units,
                while_tracing=self._while_tracing,
            )
        return self._changed[key]

    @property
    def has_default_length(self) -> bool:
        """Whether the length of a sample is that of the config, capped, because none was given."""
        return self._seq is None and self.reference.startswith("hf:")

    @property
    def has_other_loss(self) -> bool:
        """Whether another loss is asked for than the one that the model is traced with."""
        return self.loss != LEAN and (self.loss != USUAL or self.has_lean_loss)

    @property
    def has_lean_loss(self) -> bool:
        """Whether the model is traced with the lean loss."""
        if self._is_given or ":" in self.reference:
            return False
        return isinstance(shape_of(self.reference), GPTShape | LlamaShape)

    @property
    def longest_sample(self) -> int | None:
        """The longest sample that needs no other trace, in tokens; None if each length needs its own."""
        if self._architecture is not None:
            return _LONGEST
        shape = shape_of(self.reference) if self._is_shipped else None
        if isinstance(shape, GPTShape):
            return shape.max_seq
        return _LONGEST if isinstance(shape, TokenShape) else None

    def release(self) -> None:
        """Drop the model that was made to trace it, and keep its spec; another trace makes the model again."""
        if not self._is_given:
            self._task = None

    def _first_spec(self) -> ModelSpec:
        if self.reference.startswith("params:"):
            if self._seq is not None or self._image is not None:
                raise InvalidModel(f"{self.reference}: --seq and --image have no meaning for a parameter count")
            return states_only(self.reference)
        if self._is_ready():
            spec = ready_spec(self.reference, ways=())
            if spec is not None:
                self._is_shipped = True
                return replace(spec, seq=self._seq or spec.seq)
        if self.reference.startswith("hf:") and self._is_plain() and self._image is None:
            self._architecture = architecture_of(config_folder(self.reference.removeprefix("hf:")), seq=self._seq)
        if self._architecture is not None:
            return self._architecture.spec(name=self.reference, ways=())
        return self._live([])

    def _is_plain(self) -> bool:
        """Return whether the model is asked for by name, without adapters, tiles or other units, and for a GPU."""
        is_changed = self._adaptation is not None or bool(self._tile) or self._units != AUTO_UNITS
        return not self._is_given and not is_changed and self._kernels == "cuda"

    def _is_ready(self) -> bool:
        """Return whether the shipped spec holds for this sequence length, image size and kind of device."""
        if not self._is_plain() or self.reference.startswith(("python:", *FOREIGN)):
            return False
        shape = shape_of(self.reference)
        if isinstance(shape, TokenShape):
            # A longer GPT has more positions, which are parameters.
            longest = shape.max_seq if isinstance(shape, GPTShape) else 2**40
            return self._image is None and 1 <= (self._seq or 1) <= longest
        return self._seq is None and self._image in (None, shape.image_size)

    def _with(self, ways: Collection[Way]) -> ModelSpec:
        if self._is_shipped:
            spec = ready_spec(self.reference, ways=ways)
            found = {(trace.computes_in, trace.recompute) for trace in spec.traces} if spec is not None else set()
            left_out = {(way, how) for way, how in ways if (way, how) not in found and way not in FP8_WAYS}
            if spec is not None and all(how in COMPILED.values() for _, how in left_out):
                self._left_out |= left_out
                self._add(spec)
                ways = set(ways) - found - left_out
        if self._architecture is not None:
            spec = self._architecture.spec(name=self.reference, ways=ways)
            self._add(spec)
            ways = set(ways) - {(trace.computes_in, trace.recompute) for trace in spec.traces}
        return self._live(ways) if ways else self._spec

    def _add(self, spec: ModelSpec) -> None:
        """Add the traces of a spec that came with the package."""
        if spec.traces:
            traces = (*self._spec.traces, *spec.traces)
            self._spec = replace(self._spec, batch_bytes=spec.batch_bytes, traces=traces)

    def _live(self, ways: Collection[Way]) -> ModelSpec:
        """Return the spec from a new trace, or from the cache."""
        key = None
        if not self._is_given:
            key = spec_key(
                self.reference,
                seq=self._seq,
                image=self._image,
                kernels=self._kernels,
                ways=ways,
                adaptation=self._adaptation,
                tile=self._tile,
                fp8=self._fp8,
                units=self._units,
                of_transformers=self.reference in TRANSFORMERS_SHAPES,
            )
        traced = kept_spec(key)
        if traced is None:
            traced = self._traced(ways)
            keep_spec(key, traced)
        before = self._spec if hasattr(self, "_spec") else traced
        if not traced.traces:
            return replace(before, seq=traced.seq or self._seq)
        return replace(traced, seq=before.seq, traces=(*before.traces, *traced.traces))

    def _traced(self, ways: Collection[Way]) -> ModelSpec:
        with self._while_tracing(self.reference), _nothing_collected():
            from shardwise.models.specs.traced import trace_task

            if self._task is None:
                from shardwise.models.tasks.foreign import task_of

                self._task = task_of(self.reference, seq=self._seq, image=self._image)
                if self._adaptation is not None:
                    from shardwise.models.adapted import adapt

                    adapt(self._task.model, self._adaptation, name=self.reference)
            undo = []
            if self._tile:
                from shardwise.engine.activations.tiled import check_tiles, tile_modules

                check_tiles(self._task.model, tile=self._tile, units=())
                undo = tile_modules(self._task.model, tile=self._tile, verifies=False)
            try:
                return trace_task(
                    self._task,
                    name=self.reference,
                    ways=ways,
                    kernels=self._kernels,
                    fp8=self._fp8,
                    policy=self._units,
                )
            finally:
                for one in reversed(undo):
                    one()


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


def states_only(reference: str) -> ModelSpec:
    """Return the spec of a number of parameters: equal blocks, and a fiftieth at the root."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmbt]?)", reference.removeprefix("params:").lower())
    asked = float(found[1]) * _SUFFIXES[found[2]] if found else 0.0
    # A number of a thousand digits is inf, which int() refuses.
    count = int(asked) if asked < 10**15 else 0
    if count <= 0:
        raise InvalidModel(f"{reference[:100]}: must be a number of parameters, such as params:60b or params:350m")
    at_root = count // _ROOT_PART
    in_block = (count - at_root) // _NUM_BLOCKS
    sizes = {ROOT: count - _NUM_BLOCKS * in_block, **{f"blocks.{index}": in_block for index in range(_NUM_BLOCKS)}}
    units = tuple(
        UnitSpec(name=name, class_name="Unknown", params=(TensorSpec(name=f"{name}.params", shape=(size,)),))
        for name, size in sizes.items()
    )
    return ModelSpec(name=reference, units=units, call_order=tuple(sizes))
