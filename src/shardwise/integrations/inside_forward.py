"""Other methods of a prepared module, run as if they were its forward."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_TABLES = ("_forward_pre_hooks", "_forward_hooks")

Hooks = dict[str, "OrderedDict[int, Callable[..., Any]]"]


class StepsInsideForward:
    """`run("training_step", batch)`: the module is called, so that our hooks see a forward, and runs that method in it.

    In there `self(batch)` is an ordinary call without our hooks: the forward that they know of is under way already.
    The user's hooks are called by both, as they are under Lightning's own DDP. `before` are the hooks that the module
    had before it was prepared.
    """

    def __init__(self, module: nn.Module, *, before: set[int]) -> None:
        self._module = module
        self._ours = self.hooks_of(module) - before

    @staticmethod
    def hooks_of(module: nn.Module) -> set[int]:
        """The numbers of the module's hooks around its forward."""
        return {number for table in _TABLES for number in getattr(module, table)}

    def run(self, name: str, *arguments: Any, **options: Any) -> Any:
        module = self._module
        hooks: Hooks = {table: getattr(module, table) for table in _TABLES}

        def step(*arguments: Any, **options: Any) -> Any:
            with self._set(self._without_ours(hooks), forward=None):
                return getattr(module, name)(*arguments, **options)

        with self._set(hooks, forward=step):
            return module(*arguments, **options)

    def _without_ours(self, hooks: Hooks) -> Hooks:
        return {
            table: OrderedDict((number, hook) for number, hook in own.items() if number not in self._ours)
            for table, own in hooks.items()
        }

    @contextmanager
    def _set(self, hooks: Mapping[str, Any], *, forward: Callable[..., Any] | None) -> Iterator[None]:
        """The module with these hooks and this forward; None is its class's."""
        attributes = self._module.__dict__
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
