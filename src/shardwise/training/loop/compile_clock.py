"""Counts and times the compilations of torch.compile."""

import time
from types import TracebackType
from typing import Any, Self

from shardwise.base.torch_internals import torch_private


class CompileClock:
    """Counts compilations inside `with clock:`, and adds up their seconds. It may be entered several times.

    A forward is compiled when it is first called, its backward when it first runs, and both again for another shape or
    mode.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        # Registered each time, because a user's torch._dynamo.reset() drops callbacks.
        handler = torch_private.callback_handler
        handler.register_start_callback(self._start)
        handler.register_end_callback(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler = torch_private.callback_handler
        if self._start in handler.start_callbacks:
            handler.remove_start_callback(self._start)
        if self._end in handler.end_callbacks:
            handler.remove_end_callback(self._end)

    def _start(self, _: Any) -> None:
        self.num_compiles += 1
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._began
