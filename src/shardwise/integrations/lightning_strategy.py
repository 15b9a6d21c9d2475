"""Lightning's `Trainer` with our engine.

    trainer = lightning.Trainer(strategy=ShardwiseStrategy(plan=Plan(strategy="fsdp")), devices=8)

The LightningModule itself is prepared. Its steps (`training_step` …) run inside of its forward, as far as our hooks can
see: whatever parameters a step uses are there, and backward comes through what it returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from shardwise.engine.prepared.forward_method import run_inside_forward
from shardwise.engines import accumulate, clip_grad_norm_
from shardwise.errors import InvalidPlan
from shardwise.integrations.asked_plan import asked_plan, framework_precision, refuse_capture
from shardwise.integrations.prepared_models import PreparedModels
from shardwise.integrations.tested_versions import warn_if_untested
from shardwise.plan import Plan


class ShardwisePrecision(Precision):  # type: ignore[misc]
    """fp32 for Lightning: what is computed in something else, the plan says. Clips gradients that lie in slices."""

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        super().__init__()
        self._model = model

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Forward and backward first, then the step: torch's hooks of a step must not run before its gradients."""
        result = self._wrap_closure(model, optimizer, closure)
        # None: training_step said that this batch is left out.
        if result is not None or not model.automatic_optimization:
            optimizer.step(**options)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        model = self._model()
        assert model is not None
        clip_grad_norm_(model, clip_val)


class ShardwiseStrategy(DDPStrategy):  # type: ignore[misc]
    """One process per device, as in Lightning's own DDP; models run `plan`, a Plan or the name of a strategy."""

    def __init__(self, *, plan: Plan | str, **options: Any) -> None:
        warn_if_untested("lightning")
        self._asked_plan = plan
        self._said_precision = "32-true"
        self._prepared: PreparedModels | None = None
        super().__init__(**options)
        if self._ddp_kwargs:
            raise InvalidPlan(f"ShardwiseStrategy has no option {', '.join(self._ddp_kwargs)}: it is for torch's DDP")
        self._own_precision = ShardwisePrecision(lambda: self.lightning_module)

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
            self._prepared = PreparedModels(self._plan(trainer), device=lambda: self.root_device)
        if module not in self._prepared:
            if fits and self._layer_sync:
                module = self._layer_sync.apply(module)
            self._prepared.prepare(module)
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._prepared.adopt(optimizer)

    def _plan(self, trainer: Any) -> Plan:
        setting = f"Trainer(precision={self._said_precision!r})"
        plan = asked_plan(
            self._asked_plan,
            precision=framework_precision(self._said_precision, setting=setting),
            setting=setting,
            accumulate=trainer.accumulate_grad_batches,
        )
        refuse_capture(plan)
        return plan

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A pass of an accumulation that is not its last."""
        with accumulate(self.lightning_module):
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: our hooks come with the graph."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: our hooks come with the graph."""

    def model_to_device(self) -> None:
        """Nothing: `prepare` has moved each rank's slices."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("training_step", *arguments, **options)

    def validation_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("validation_step", *arguments, **options)

    def test_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("test_step", *arguments, **options)

    def predict_step(self, *arguments: Any, **options: Any) -> Any:
        return self._inside("predict_step", *arguments, **options)

    def _inside(self, name: str, *arguments: Any, **options: Any) -> Any:
        return run_inside_forward(self.lightning_module, name, *arguments, **options)

    def teardown(self) -> None:
        """Lightning's own, but that a prepared model stays where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
