"""Lightning Fabric with our engine:

fabric = lightning.Fabric(strategy=ShardwiseFabricStrategy(plan=Plan(strategy="fsdp")), devices=8)
model, optimizer = fabric.setup(model, optimizer)
"""

from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.tested_versions import warn_if_untested
from shardwise.doors.integrations.asked_plan import asked_plan
from shardwise.doors.integrations.prepared_models import PreparedModels
from shardwise.engines import accumulate, clip_grad_norm_, clip_grad_value_
from shardwise.plan import Plan


class _Accumulation(_BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulate(module, enabled=enabled)


# How a plan is chosen, for errors.
_CHOOSE = (
    "choose it first: task = shardwise.Task(model=model, loss=loss, make_batch=make_batch), then "
    "ShardwiseFabricStrategy(plan=shardwise.Plan.auto(task, cluster='8xh100-80gb'))"
)


class ShardwiseFabricStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy with one process per device, like Fabric's DDP; models run `plan`, a Plan or a strategy's name."""

    def __init__(self, *, plan: Plan | str, **options: Any) -> None:
        warn_if_untested("lightning")
        self._asked_plan = plan
        self._said_precision = "32-true"
        self._own_precision = Precision()
        super().__init__(**options)
        if self._ddp_kwargs:
            raise InvalidPlan(
                f"ShardwiseFabricStrategy has no option {', '.join(self._ddp_kwargs)}: it is for torch's DDP"
            )
        self._backward_sync_control = _Accumulation()
        self._prepared: PreparedModels | None = None

    @property
    def precision(self) -> Any:
        """Return fp32 to Fabric: the plan sets the precision of the model."""
        return self._own_precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            self._said_precision = plugin.precision

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self._prepared is None:
            said = self._said_precision
            plan = asked_plan(self._asked_plan, said=said, setting=f"Fabric(precision={said!r})")
            self._prepared = PreparedModels(plan, device=lambda: self.root_device, choose=_CHOOSE)
        self._prepared.prepare(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self._prepared is not None:
            self._prepared.adopt(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `prepare` moves each rank's slices."""

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip what the optimizer steps by the norm of the whole gradient, wherever its slices are. Collective."""
        parameters = self._stepped_by(optimizer, module)
        return clip_grad_norm_(
            module, max_norm, norm_type, parameters=parameters, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp what the optimizer steps."""
        clip_grad_value_(module, clip_val, parameters=self._stepped_by(optimizer, module))

    def _stepped_by(self, optimizer: Optimizer, module: nn.Module) -> list[nn.Parameter]:
        assert self._prepared is not None
        return self._prepared.stepped_by(optimizer, model=module)
