"""MODEL of the command line, as a value with three questions: its spec, its task, its weights.

gpt2-124m                  a catalogue model: its spec comes with the package
params:60b                 a number of parameters; nothing else is known of the model
python:FILE.py:function    your own Task
hf:DIR (or hf:DIR/config.json, hf:Qwen/Qwen3-8B), timm:NAME, torchvision:NAME    models of other libraries

torch is imported only for tasks, weights, and specs that have to be traced.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.base.vocabulary.heads import HEADS
from shardwise.models.catalogue import kind_of, shape_of
from shardwise.models.shapes import GPTShape, LlamaShape, TokenShape
from shardwise.models.specs.architecture import architecture_for
from shardwise.models.specs.spec_request import Adaptation, SpecRequest, Way
from shardwise.models.specs.spec_store import SpecStore, is_shipped
from shardwise.plan import Plan
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.planner.memory.peak import computes_in
from shardwise.planner.ways import fp8_traces, traced_ways
from shardwise.program.buffers import fp8_weight_names
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.losses import LEAN, USUAL, with_loss

if TYPE_CHECKING:
    import torch

    from shardwise.models.tasks import Task

# Models with rotary positions have no longest sample of their own.
_LONGEST = 131_072


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model. LoRA, another length or another loss make another one: `dataclasses.replace`.

    asked        its reference, or a task of the caller's, which is traced in any case
    seq, image   length of a sample in tokens, width of an image in pixels; None: the model's own
    lengths      of batches in their order, if they differ (ModelSpec); `seq` is the longest
    kernels      of a spec: those of a cuda or cpu device
    loss         of a spec of a model that reads tokens (program/spec/losses.py): lean, which `shardwise train` uses,
                 for catalogue models; for others their own, which is the usual one
    adaptation   LoRA or QLoRA instead of training all parameters
    """

    asked: "Task | str" = field(kw_only=False)
    seq: int | None = None
    lengths: tuple[int, ...] = ()
    image: int | None = None
    kernels: str = "cuda"
    loss: str = LEAN
    adaptation: Adaptation | None = None
    while_tracing: Callable[[str], AbstractContextManager[object]] = field(
        default=lambda name: nullcontext(), compare=False, repr=False
    )
    # What was found already; no answer depends on it.
    _specs: SpecStore = field(init=False, compare=False, repr=False, default_factory=SpecStore)
    _asked: dict[ModelSpec, ModelSpec] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.adaptation is not None and self.kind in ("params", "python", "task"):
            raise InvalidModel(f"{self.reference}: --lora is for models by name; a python: task adds its own adapters")
        if self.kind == "params" and (self.seq is not None or self.image is not None):
            raise InvalidModel(f"{self.reference}: --seq, --lengths and --image have no meaning for a parameter count")

    @property
    def reference(self) -> str:
        return self.asked if isinstance(self.asked, str) else type(self.asked.model).__name__

    @property
    def kind(self) -> str:
        return self._request.kind

    @property
    def _request(self) -> SpecRequest:
        return SpecRequest(
            reference=self.reference,
            is_given=not isinstance(self.asked, str),
            seq=self.seq,
            image=self.image,
            kernels=self.kernels,
            adaptation=self.adaptation,
        )

    # ---- three questions

    def spec_for(self, *plans: Plan) -> ModelSpec:
        """Return the spec with the traces that the plans need, which cut the model alike; without a plan, with none."""
        request, find = self._request, partial(self._specs.find, trace=self._traced)
        if self.kind == "params" and any(plan.units != AUTO_UNITS for plan in plans):
            raise InvalidPlan(f"units = {plans[0].units!r}: {self.reference} has no modules to cut")
        if self.kind == "params" or not plans:
            return find(request)
        first = plans[0]
        assert all((plan.units, plan.tile) == (first.units, first.tile) for plan in plans), "they cut it differently"
        request = request.under(first)
        bare = find(request)
        layers = frozenset[str]().union(*(fp8_weight_names(bare, plan=plan) for plan in plans))
        request = replace(request, fp8=layers)
        ways = {
            *((computes_in(bare, plan=plan), how) for plan in plans for how in traced_ways(bare, plan=plan)),
            *(way for plan in plans for way in fp8_traces(bare, plan=plan)),
        }
        found = find(request, ways=ways)
        if found not in self._asked:
            # Where the loss is computed in the tiles of the head, it is the same whatever the loop would do.
            is_tiled = any(pattern.rpartition(".")[2] in HEADS for pattern in first.tile)
            spec = found if is_tiled else with_loss(found, loss=self.loss, is_lean=self.has_lean_loss)
            self._asked[found] = replace(spec, lengths=self.lengths) if self.lengths else spec
        return self._asked[found]

    def _traced(self, request: SpecRequest, ways: Collection[Way]) -> ModelSpec:
        with self.while_tracing(self.reference):
            from shardwise.models.specs.traced import trace_task

            task = self._specs.task = self._specs.task or self.task()
            kernels, fp8, tile = request.kernels, request.fp8, request.tile
            name, units = self.reference, request.units
            return trace_task(task, name=name, ways=ways, kernels=kernels, fp8=fp8, policy=units, tile=tile)

    def task(self, *, dataset: str | None = None, device: "torch.device | str" = "meta") -> "Task":
        """Return the model with its loss and its batches and, if there is a `dataset`, its data."""
        if not isinstance(self.asked, str):
            return self.asked
        from shardwise.models.tasks import load_task

        task = load_task(self.asked, dataset=dataset, seq=self.seq, image=self.image, device=device)
        if self.adaptation is not None:
            from shardwise.models.adapted import adapt

            adapt(task.model, self.adaptation, name=self.reference)
        return task

    def weights(
        self, *, dataset: str | None, tokenizer: str | None, native: bool, device: "torch.device | str"
    ) -> "Task":
        """Return the task of a checkpoint folder with the weights of its files (Task.weights), and adapters if asked.

        native    in the dtypes of the files
        device    quantises the weights, if they are to be quantised
        """
        kind, name = kind_of(self.reference)
        if kind != "hf":
            raise InvalidModel(f"{self.reference}: has no files with weights; hf:DIR has them")
        from shardwise.models.weights.fine_tune import checkpoint_task

        return checkpoint_task(
            name,
            dataset=dataset,
            seq=self.seq,
            tokenizer=tokenizer,
            adaptation=self.adaptation,
            native=native,
            device=device,
        )

    # ---- what else a command asks of it

    def release(self) -> None:
        """Free the model that was made to trace it; another trace makes it again."""
        self._specs.task = None

    @property
    def has_default_length(self) -> bool:
        """Return whether the length of a sample is that of the config, capped, because none was given."""
        return self.seq is None and self.kind == "hf"

    @property
    def has_other_loss(self) -> bool:
        """Return whether another loss is asked for than the one that the model is traced with."""
        return self.loss != LEAN and (self.loss != USUAL or self.has_lean_loss)

    @property
    def has_lean_loss(self) -> bool:
        """Return whether the model is traced with the lean loss."""
        return self.kind == "" and isinstance(shape_of(self.reference), GPTShape | LlamaShape)

    @property
    def longest_sample(self) -> int | None:
        """The longest sample that needs no other trace, in tokens; None if each length needs its own."""
        if architecture_for(self._request) is not None:
            return _LONGEST
        shape = shape_of(self.reference) if is_shipped(self._request) else None
        if isinstance(shape, GPTShape):
            return shape.max_seq
        return _LONGEST if isinstance(shape, TokenShape) else None
