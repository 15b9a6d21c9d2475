"""Lightning's code that handles parameters: callbacks, `toggle_optimizer`, and its wrappers of optimizers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan
from shardwise.plan import Plan
from shardwise.program.units import unit_modules

# The methods that read or change parameters through param groups.
_OF_CALLBACKS = ("on_fit_start", "on_train_epoch_start")
_OF_MODULES = ("toggle_optimizer", "untoggle_optimizer")
# The methods that an optimizer of a prepared model has of its own.
_OF_OPTIMIZERS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")

Showing = Callable[[Optimizer], AbstractContextManager[None]]


def show_parameters(trainer: Any, *, showing: Showing) -> ExitStack:
    """Let finetuning callbacks and `toggle_optimizer` find the model's own parameters in the param groups.

    showing   a block in which the groups of an optimizer hold the model's parameters, not this rank's slices

    Close the result to undo it.
    """
    undo = ExitStack()
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
    methods = [(callback, name) for callback in callbacks for name in _OF_CALLBACKS]
    for owner, name in [*methods, *((trainer.lightning_module, name) for name in _OF_MODULES)]:
        owner.__dict__[name] = partial(_run, getattr(owner, name), trainer, showing)
        undo.callback(owner.__dict__.pop, name)
    return undo


def refuse_averages(callbacks: Iterable[Any], *, module: nn.Module, plan: Plan) -> None:
    """Refuse callbacks that average whole parameters, where the plan shards them."""
    found = next((one for one in callbacks if isinstance(one, StochasticWeightAveraging | WeightAveraging)), None)
    placements = plan.placements(unit_modules(module, policy=plan.units)) if found is not None else {}
    if any(placement.params.is_sharded for placement in placements.values()):
        raise InvalidPlan(
            f"{type(found).__name__} averages whole parameters, which {plan.strategy} shards: make a "
            "shardwise.EMA(module, decay=…) in on_fit_start and call its update() in on_train_batch_end; or use zero2"
        )


def use_own_methods(wrapper: Any) -> None:
    """Make Lightning's wrapper, which inherits from the optimizer's class, call the methods of the optimizer itself."""
    for name in _OF_OPTIMIZERS:
        setattr(wrapper, name, getattr(wrapper.optimizer, name))


def _run(method: Callable[..., None], trainer: Any, showing: Showing, *arguments: Any) -> None:
    with ExitStack() as stack:
        for optimizer in trainer.optimizers:
            stack.enter_context(showing(optimizer))
        stack.enter_context(_found_by_identity())
        method(*arguments)


@contextmanager
def _found_by_identity() -> Iterator[None]:
    """Make BaseFinetuning recognise the parameters of an optimizer by identity.

    It compares their values, which are elsewhere if they are sharded. It would also leave a parameter out whose values
    happen to equal another one's.
    """
    own = BaseFinetuning.filter_on_optimizer
    BaseFinetuning.filter_on_optimizer = staticmethod(_not_in_groups)
    try:
        yield
    finally:
        BaseFinetuning.filter_on_optimizer = staticmethod(own)


def _not_in_groups(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in held]
