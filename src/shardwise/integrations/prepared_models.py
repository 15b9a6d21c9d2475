"""The models that one framework object (an accelerator, a strategy) has prepared, and the optimizers that step them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engine.protocol import find_engine, require_engine
from shardwise.engines import prepare
from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.plan import Plan


class PreparedModels:
    """The models prepared by `plan`; `device` is called for each.

    choose   how a user of this framework has a plan chosen, for the error about one that is not (strategy = 'auto')
    """

    def __init__(self, plan: Plan, *, device: Callable[[], torch.device], choose: str) -> None:
        self.plan = plan
        self._device, self._choose = device, choose
        self._models: WeakSet[nn.Module] = WeakSet()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._models))

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._models

    def prepare(self, model: nn.Module) -> None:
        """Prepare a model unless it was prepared here before or has no parameters. Collective."""
        if model in self._models or next(model.parameters(), None) is None:
            return
        if find_engine(model) is not None:
            raise InvalidModel(
                f"this {type(model).__name__} has been through shardwise.prepare already: hand over the model as it "
                "was made, with the plan"
            )
        if self.plan.is_auto:
            raise InvalidPlan(f"plan = 'auto': the plan is not chosen yet; {self._choose}")
        prepare(model, None, self.plan, device=self._device())
        self._models.add(model)

    def stepped_by(self, optimizer: Optimizer, *, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the model that an optimizer steps, on any rank."""
        names = {name for group in require_engine(model).group_names(model, optimizer) for name in group}
        return [parameter for name, parameter in model.named_parameters() if name in names]

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer of these models' parameters step what this rank owns. Collective."""
        for model in self:
            engine = require_engine(model)
            if engine.concerns(model, optimizer):
                engine.adopt(model, optimizer)

    @contextmanager
    def showing_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Show the models' own parameters in the optimizer's param groups, which may be changed in the block."""
        with ExitStack() as stack:
            for model in self:
                stack.enter_context(require_engine(model).showing_parameters(model, optimizer))
            yield
