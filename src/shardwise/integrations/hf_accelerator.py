"""Hugging Face Accelerate with our engine: an `Accelerator` whose `prepare` runs a plan.

    accelerator = ShardwiseAccelerator(plan=Plan(strategy="fsdp"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loop stays as it is. `accumulate`, `save_state`, `load_state`, `get_state_dict` and `unwrap_model` are Accelerate's
own: what they ask of a model and an optimizer, prepared ones answer (engine/prepared).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn

from shardwise.engines import clip_grad_norm_
from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.integrations.asked_plan import asked_plan, framework_precision, refuse_capture
from shardwise.integrations.prepared_models import PreparedModels
from shardwise.integrations.tested_versions import warn_if_untested
from shardwise.plan import Plan

# Ways to run that are other engines.
_OTHER_ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


class ShardwiseAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's own, but that models run `plan`: a Plan, or the name of a strategy."""

    def __init__(self, *arguments: Any, plan: Plan | str, **options: Any) -> None:
        for handler in options.get("kwargs_handlers") or ():
            if isinstance(handler, DistributedDataParallelKwargs):
                raise InvalidPlan(
                    "DistributedDataParallelKwargs with ShardwiseAccelerator: they are for torch's DDP; leave them out"
                )
        super().__init__(*arguments, **options)
        self.run_plan(plan)
        refuse_capture(self.plan)

    @staticmethod
    def adopt(accelerator: Any, *, plan: Plan | str) -> "ShardwiseAccelerator":
        """An Accelerator that was made elsewhere becomes one of ours; it stays the same object."""
        accelerator.__class__ = ShardwiseAccelerator
        accelerator.run_plan(plan)
        adopted: ShardwiseAccelerator = accelerator
        return adopted

    def run_plan(self, plan: Plan | str) -> None:
        """From now on models are prepared for `plan`."""
        warn_if_untested("accelerate")
        if self.distributed_type in [getattr(DistributedType, name) for name in _OTHER_ENGINES]:
            raise InvalidPlan(
                f"Accelerate is set to {self.distributed_type.value} (a plugin, `accelerate config` or a variable): "
                "Shardwise is an engine of its own; leave that out and set plan.strategy"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise InvalidPlan("torch_compile or a dynamo plugin: set plan.compile = 'inductor' instead")
        setting = f"mixed_precision={self.mixed_precision!r}"
        self.plan = asked_plan(
            plan, precision=framework_precision(self.mixed_precision, setting=setting), setting=setting
        )
        self._prepared = PreparedModels(self.plan, device=lambda: self.device)

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Accelerate's own, once every model among the objects runs the plan. Collective."""
        for entry in objects:
            if isinstance(entry, nn.Module):
                self._prepared.prepare(entry)
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._prepared.prepare(model)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        inner = optimizer
        while isinstance(inner, AcceleratedOptimizer):
            inner = inner.optimizer
        self._prepared.adopt(inner)
        return super().prepare_optimizer(optimizer, device_placement)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the whole gradient, wherever its slices lie; the same on every rank. Collective."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        asked = {id(parameter) for parameter in given}
        for model in self._prepared:
            own = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
            if asked == set(own) or asked == {key for key, trained in own.items() if trained}:
                return clip_grad_norm_(model, max_norm, norm_type)
            if asked & set(own):
                raise InvalidModel(
                    f"clip_grad_norm_ of {len(asked)} of a model's {len(own)} parameters: Shardwise clips the "
                    "gradient of a whole model; hand over model.parameters()"
                )
        return super().clip_grad_norm_(given, max_norm, norm_type)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Nothing: what a model computes in is its plan's."""
        yield
