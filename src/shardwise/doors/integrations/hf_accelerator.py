"""Hugging Face Accelerate with our engine: an `Accelerator` whose `prepare` runs a plan.

    accelerator = ShardwiseAccelerator(plan=Plan(strategy="fsdp"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loop stays as it is. `accumulate`, `save_state`, `load_state`, `get_state_dict` and `unwrap_model` are Accelerate's
own: prepared models and optimizers have the methods that they call (engine/prepared).
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.base.vocabulary.tested_versions import warn_if_untested
from shardwise.doors.integrations.asked_plan import asked_plan
from shardwise.doors.integrations.loss_parameters import announce_loss
from shardwise.doors.integrations.prepared_models import PreparedModels
from shardwise.engines import clip_grad_norm_
from shardwise.plan import Plan

# Distributed types of Accelerate that are other engines.
_OTHER_ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")

_PREPARE_OPTIMIZER = (
    "it has not been prepared, and so does not wait for the last pass; optimizer = accelerator.prepare(optimizer)"
)


class ShardwiseAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose models run `plan`: a Plan, or the name of a strategy."""

    # Whether gradients are cleared before the first backward, as the Trainer does it.
    _clears = False
    # How a plan is chosen, for errors.
    _choose = (
        "before prepare: task = shardwise.Task(model=model, loss=lambda model, batch: model(**batch).loss, "
        "make_batch=make_batch), then accelerator.run_plan(shardwise.Plan.auto(task))"
    )

    def __init__(self, *arguments: Any, plan: Plan | str, **options: Any) -> None:
        for handler in options.get("kwargs_handlers") or ():
            if isinstance(handler, DistributedDataParallelKwargs):
                raise InvalidPlan(
                    "DistributedDataParallelKwargs with ShardwiseAccelerator: they are for torch's DDP; leave them out"
                )
        super().__init__(*arguments, **options)
        self.run_plan(plan)

    @staticmethod
    def adopt(accelerator: Any, *, plan: Plan | str, choose: str) -> "ShardwiseAccelerator":
        """Turn an existing Accelerator into one of ours; it stays the same object."""
        accelerator.__class__ = ShardwiseAccelerator
        accelerator._choose, accelerator._clears = choose, True
        accelerator.run_plan(plan)
        adopted: ShardwiseAccelerator = accelerator
        return adopted

    def run_plan(self, plan: Plan | str) -> None:
        """Prepare models for `plan` from now on."""
        warn_if_untested("accelerate")
        if self.distributed_type in [getattr(DistributedType, name) for name in _OTHER_ENGINES]:
            raise InvalidPlan(
                f"Accelerate is set to {self.distributed_type.value} (a plugin, `accelerate config` or a variable): "
                "Shardwise is another engine; leave that out and set plan.strategy"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise InvalidPlan("torch_compile or a dynamo plugin: set plan.compile = 'inductor' instead")
        said = self.mixed_precision
        self.plan = asked_plan(plan, said=said, setting=f"mixed_precision={said!r}")
        self._prepared = PreparedModels(self.plan, device=lambda: self.device, choose=self._choose)

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Make every model among the objects run the plan, then call Accelerate's own `prepare`. Collective."""
        models = [entry for entry in objects if isinstance(entry, nn.Module)]
        for model in models:
            self._prepared.prepare(model, clear=self._clears)
        for entry in objects if models else ():
            if isinstance(entry, Optimizer):
                self._prepared.check(_inner(entry))
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._prepared.prepare(model, clear=self._clears)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        self._prepared.adopt(_inner(optimizer))
        return super().prepare_optimizer(optimizer, device_placement)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        with super().accumulate(*models), ExitStack() as stack:
            if not self.sync_gradients:
                # A prepared optimizer waits for the last pass.
                stack.enter_context(self._prepared.refusing_steps(way_out=_PREPARE_OPTIMIZER))
            yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        for model in self._prepared:
            announce_loss(model, loss)
        super().backward(loss, **options)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole gradient, and return it, the same on every rank. Collective."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        asked = {id(parameter) for parameter in given}
        for model in self._prepared:
            own = {id(parameter) for parameter in model.parameters()}
            if asked and asked <= own:
                return clip_grad_norm_(model, max_norm, norm_type, parameters=given)
            if asked & own:
                raise InvalidModel(
                    f"clip_grad_norm_ of parameters of which {len(asked & own)} are a prepared model's and "
                    f"{len(asked - own)} are not: clip each model by itself"
                )
        return super().clip_grad_norm_(given, max_norm, norm_type)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Do nothing: the plan sets the precision of a model."""
        yield


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
