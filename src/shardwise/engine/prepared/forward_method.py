"""Runs other methods of a prepared model as its forward."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.engine.core.part_calls import PartCalls
from shardwise.engine.engine import engine_of

_TABLES = ("_forward_pre_hooks", "_forward_hooks")

Hooks = dict[str, "OrderedDict[int, Callable[..., Any]]"]


def forward_method(model: nn.Module, name: str) -> None:
    """Make calls of `model.NAME(…)` count as a forward of the model.

        model, optimizer = shardwise.prepare(model, optimizer, plan)
        shardwise.forward_method(model, "training_step")
        model.training_step(batch).backward()

    Backward starts from the tensors that the method returns. Inside it, `self(x)` is an ordinary call.
    """
    engine_of(model)
    kind = type(model)
    method = getattr(kind, name, None)
    if name == "forward" or name in model.__dict__ or not callable(method):
        raise InvalidModel(f"{kind.__name__} has no method {name!r} that could stand for its forward")
    if getattr(method, "_runs_inside_forward", False):
        return

    @wraps(method)
    def inside(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        return run_inside_forward(self, name, *arguments, method=method, **options)

    inside._runs_inside_forward = True  # type: ignore[attr-defined]
    # The class belongs to this model only (prepared_module.py); copies do not have it.
    setattr(kind, name, inside)


def run_inside_forward(
    model: nn.Module, name: str, *arguments: Any, method: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Call the model, so that our hooks see a forward, and run the method in place of its forward.

    Inside it `self(batch)` is an ordinary call without our hooks: for them the forward has begun already. The user's
    hooks run for both calls, as they do under Lightning's own DDP.
    """
    hooks: Hooks = {table: getattr(model, table) for table in _TABLES}
    own = method or getattr(type(model), name)

    def step(*arguments: Any, **options: Any) -> Any:
        with _set(model, _without_ours(model, hooks), forward=None):
            return own(model, *arguments, **options)

    with _set(model, hooks, forward=step):
        return model(*arguments, **options)


def run_with_backward(model: nn.Module, name: str, *arguments: Any, **options: Any) -> Any:
    """Call the model, and run a method in place of its forward that calls parts of it, backward and updates itself."""

    def step(*arguments: Any, **options: Any) -> Any:
        with PartCalls(engine_of(model).core).watched():
            return getattr(type(model), name)(*arguments, **options)

    return run_inside_forward(model, name, *arguments, method=step, **options)


def _without_ours(model: nn.Module, hooks: Hooks) -> Hooks:
    engine = engine_of(model)
    ours = {handle.id for handle in (*engine.handles, *engine.core.hooks.handles)}
    return {
        table: OrderedDict((number, hook) for number, hook in own.items() if number not in ours)
        for table, own in hooks.items()
    }


@contextmanager
def _set(model: nn.Module, hooks: Mapping[str, Any], *, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Give the model these hooks and this forward (None: that of its class)."""
    attributes = model.__dict__
    before = {name: attributes[name] for name in (*_TABLES, "forward") if name in attributes}
    attributes.update(hooks)
    attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward", None)
        attributes.update(before)
