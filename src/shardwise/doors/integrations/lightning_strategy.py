"""Lightning's `Trainer` with our engine.

    trainer = lightning.Trainer(strategy=ShardwiseStrategy(plan=Plan(strategy="fsdp")), devices=8)

The LightningModule itself is prepared. To our hooks, its steps (`training_step` …) run inside its forward: the
parameters that a step uses are gathered, and backward starts from what it returns.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.tested_versions import warn_if_untested
from shardwise.doors.integrations.asked_plan import asked_plan
from shardwise.doors.integrations.lightning_parameters import refuse_averages, show_parameters, use_own_methods
from shardwise.doors.integrations.prepared_models import PreparedModels
from shardwise.engine.prepared.forward_method import run_inside_forward, run_with_backward
from shardwise.engines import accumulate, clip_grad_norm_, clip_grad_value_
from shardwise.plan import Plan


class ShardwisePrecision(Precision):  # type: ignore[misc]
    """fp32 for Lightning, since the plan sets the precision of the model. Clips gradients that are in slices."""

    def __init__(self, stepped_by: Callable[[Any], tuple[nn.Module, list[nn.Parameter]]]) -> None:
        super().__init__()
        # An optimizer → the model and those of its parameters that it steps.
        self._stepped_by = stepped_by

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Run forward and backward first, then the step: the optimizer's step hooks need the gradients."""
        result = self._wrap_closure(model, optimizer, closure)
        # None: training_step has skipped this batch.
        if result is not None or not model.automatic_optimization:
            optimizer.step(**options)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        model, parameters = self._stepped_by(optimizer)
        clip_grad_norm_(model, clip_val, parameters=parameters)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        model, parameters = self._stepped_by(optimizer)
        clip_grad_value_(model, clip_val, parameters=parameters)


# How a plan is chosen, for errors.
_CHOOSE = (
    "choose it first: task = shardwise.Task(model=module, loss=lambda module, batch: module.training_step(batch, 0), "
    "make_batch=make_batch), then ShardwiseStrategy(plan=shardwise.Plan.auto(task, cluster='8xh100-80gb'))"
)


class ShardwiseStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy with one process per device, like Lightning's DDP; models run `plan`, a Plan or a strategy's name."""

    def __init__(self, *, plan: Plan | str, **options: Any) -> None:
        warn_if_untested("lightning")
        self._asked_plan = plan
        self._said_precision = "32-true"
        self._prepared: PreparedModels | None = None
        self._undo = ExitStack()
        super().__init__(**options)
        if self._ddp_kwargs:
            raise InvalidPlan(f"ShardwiseStrategy has no option {', '.join(self._ddp_kwargs)}: it is for torch's DDP")
        self._own_precision = ShardwisePrecision(self._stepped_by)

    @property
    def precision_plugin(self) -> Any:
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            self._said_precision = plugin.precision

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._prepared is None:
            self._prepared = PreparedModels(self._plan(trainer), device=lambda: self.root_device, choose=_CHOOSE)
        if module not in self._prepared:
            if fits and self._layer_sync:
                module = self._layer_sync.apply(module)
            if fits:
                refuse_averages(trainer.callbacks, module=module, plan=self._prepared.plan)
            self._prepared.prepare(module, clear=module.automatic_optimization or not fits)
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._prepared.adopt(optimizer)
            for wrapper in self._lightning_optimizers:
                use_own_methods(wrapper)
            self._undo = show_parameters(trainer, showing=self._prepared.showing_parameters)

    def _plan(self, trainer: Any) -> Plan:
        said, accumulate = self._said_precision, trainer.accumulate_grad_batches
        setting = f"Trainer(precision={said!r})"
        plan = asked_plan(self._asked_plan, said=said, setting=setting, accumulate=accumulate)
        return plan

    def _stepped_by(self, optimizer: Any) -> tuple[nn.Module, list[nn.Parameter]]:
        assert self._prepared is not None
        model: nn.Module = self.lightning_module
        # In manual optimization it is a LightningOptimizer.
        return model, self._prepared.stepped_by(getattr(optimizer, "optimizer", optimizer), model=model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: this pass is not the last one before an update."""
        with accumulate(self.lightning_module):
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: our hooks are in the autograd graph."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: our hooks are in the autograd graph."""

    def model_to_device(self) -> None:
        """Do nothing: `prepare` has moved each rank's slices."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        if self.lightning_module.automatic_optimization:
            return self._inside("training_step", *arguments, **options)
        return run_with_backward(self.lightning_module, "training_step", *arguments, **options)

    def validation_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("validation_step", *arguments, **options)

    def test_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("test_step", *arguments, **options)

    def predict_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("predict_step", *arguments, **options)

    def _inside(self, name: str, *arguments: Any, **options: Any) -> Any:
        return run_inside_forward(self.lightning_module, name, *arguments, **options)

    def teardown(self) -> None:
        """Do what Lightning's method does, but leave a prepared model on its device."""
        self._undo.close()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
