"""Another forward for a module, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, the module's forward is `wrap(its forward)`; afterwards it is its class's again, or its own."""
    own = vars(module).get("forward")
    module.forward = wrap(module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
