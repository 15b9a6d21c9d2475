"""Code that torch's tracer would trace wrongly: it is noticed while it is traced, and runs in Python instead.

lookups that fail   a caught KeyError or AttributeError leaves no guard: the trace would go on where the key was added
classes             an attribute of a class that the code writes is read as it was before
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from shardwise.base.torch_internals import torch_private

_RAISES = ("RAISE_VARARGS", "RERAISE")
_LOOKUPS = ("ObservedKeyError", "ObservedAttributeError")


class NotTraced(Exception):  # noqa: N818 - is caught where the trace began
    """Why code is not traced."""


class _Noticing(threading.local):
    """Whether this thread traces for us, and not for the user's own torch.compile."""

    is_on = False


_NOTICING = _Noticing()


@contextmanager
def noticing_gaps() -> Iterator[None]:
    """Raise NotTraced from a trace of this thread that would be wrong."""
    _look_on()
    before, _NOTICING.is_on = _NOTICING.is_on, True
    try:
        yield
    finally:
        _NOTICING.is_on = before


@cache
def _look_on() -> None:
    """Look on where the tracer handles errors and writes attributes: for good, since threads trace at the same time."""
    handle, store = torch_private.handle_exception, torch_private.store_attribute

    def handle_exception(translator: Any, error: Any) -> None:
        is_raised = translator.current_instruction.opname in _RAISES or getattr(error, "raised_by_code", False)
        is_lookup = type(error).__name__ in _LOOKUPS and not _asks_for_protocols(translator, error)
        if _NOTICING.is_on and is_lookup and not is_raised:
            raise NotTraced("it looks up a key or an attribute that is not there, and torch does not look again")
        error.raised_by_code = True
        handle(translator, error)

    def store_attribute(effects: Any, item: Any, *values: Any, **options: Any) -> None:
        if _NOTICING.is_on and isinstance(item, torch_private.ClassVariable):
            raise NotTraced("it writes an attribute of a class, which torch reads as it was before")
        store(effects, item, *values, **options)

    torch_private.replace("handle_exception", handle_exception)
    torch_private.replace("store_attribute", store_attribute)


def _asks_for_protocols(translator: Any, error: Any) -> bool:
    """Return whether the standard library looks for an attribute, such as `__signature__`: nobody adds one later."""
    package = str(translator.f_globals.get("__name__", "")).partition(".")[0]
    return type(error).__name__ == "ObservedAttributeError" and package in sys.stdlib_module_names
