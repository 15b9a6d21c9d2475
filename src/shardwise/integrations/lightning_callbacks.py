"""Lightning's callbacks that look for the model's parameters in an optimizer's param groups."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

# The hooks in which BaseFinetuning reads, extends or replaces param groups.
_HOOKS = ("on_fit_start", "on_train_epoch_start")

Showing = Callable[[Optimizer], AbstractContextManager[None]]


def show_parameters(callbacks: Iterable[Any], *, showing: Showing) -> ExitStack:
    """Let finetuning callbacks find the model's own parameters in the param groups. Close the result to undo it.

    showing   a block in which the groups of an optimizer hold the model's parameters, not this rank's slices
    """
    undo = ExitStack()
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            for name in _HOOKS:
                setattr(callback, name, partial(_run, getattr(callback, name), showing))
                undo.callback(callback.__dict__.pop, name)
    return undo


def _run(hook: Callable[..., None], showing: Showing, trainer: Any, module: Any) -> None:
    with ExitStack() as stack:
        for optimizer in trainer.optimizers:
            stack.enter_context(showing(optimizer))
        stack.enter_context(_found_by_identity())
        hook(trainer, module)


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
