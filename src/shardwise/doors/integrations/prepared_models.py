"""The models that one framework object (an accelerator, a strategy) has prepared, and the optimizers that step them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.engines import find_engine, prepare, require_engine
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

    def prepare(self, model: nn.Module, *, clear: bool = False) -> None:
        """Prepare a model unless it was prepared here before or has no parameters. Collective.

        `clear`: drop gradients that it has, which the framework itself clears before its first backward.
        """
        if model in self._models or next(model.parameters(), None) is None:
            return
        if find_engine(model) is not None:
            raise InvalidModel(
                f"this {type(model).__name__} has been through shardwise.prepare already: hand over the model as it "
                "was made, with the plan"
            )
        if self.plan.is_auto:
            raise InvalidPlan(f"plan = 'auto': the plan is not chosen yet; {self._choose}")
        if clear:
            model.zero_grad()
        prepare(model, None, self.plan, device=self._device())
        self._models.add(model)

    def stepped_by(self, optimizer: Optimizer, *, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the model that an optimizer steps, on any rank."""
        names = {name for group in require_engine(model).group_names(optimizer) for name in group}
        return [parameter for name, parameter in model.named_parameters() if name in names]

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer of these models' parameters step what this rank owns. Collective.

        One of other parameters is refused by its first step: its model may be prepared after it.
        """
        models = self._stepped_models(optimizer)
        for model in models:
            require_engine(model).adopt(optimizer)
        if not models:
            optimizer.register_step_pre_hook(lambda one, *_: self.check(one))

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that steps none of these models. Collective then."""
        if self._stepped_models(optimizer):
            return
        model = next(iter(self), None)
        if model is None:
            raise InvalidModel(
                f"{type(optimizer).__name__} steps a model that has not been prepared, so that ranks would train it "
                "apart: prepare the model, too"
            )
        # Raises what shardwise.prepare raises.
        require_engine(model).adopt(optimizer)

    @contextmanager
    def refusing_steps(self, *, way_out: str) -> Iterator[None]:
        """Refuse a step of these models in this block, which is the middle of an accumulation."""

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            if self._stepped_models(optimizer):
                raise InvalidModel(f"{type(optimizer).__name__} steps in the middle of an accumulation: {way_out}")

        with register_optimizer_step_pre_hook(refuse):
            yield

    def _stepped_models(self, optimizer: Optimizer) -> list[nn.Module]:
        return [model for model in self if require_engine(model).concerns(optimizer)]

    @contextmanager
    def showing_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Show the models' own parameters in the optimizer's param groups, which may be changed in the block."""
        with ExitStack() as stack:
            for model in self:
                stack.enter_context(require_engine(model).showing_parameters(optimizer))
            yield
