"""What torch.compile compiles, in which step, and for how long."""

import time
from types import TracebackType
from typing import Any, Self


class CompileClock:
    """Runs while torch compiles inside of `with clock:`; may be entered again and again, and adds up.

    A forward is compiled in the first call that needs it, its backward in the first that comes to it, both perhaps
    several times: for another shape, or another mode.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        # A user's torch._dynamo.reset() forgets callbacks, so they are given again each time.
        handler = _handler()
        handler.register_start_callback(self._start)
        handler.register_end_callback(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler = _handler()
        if self._start in handler.start_callbacks:
            handler.remove_start_callback(self._start)
        if self._end in handler.end_callbacks:
            handler.remove_end_callback(self._end)

    def _start(self, _: Any) -> None:
        self.num_compiles += 1
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def _handler() -> Any:
    from torch._dynamo.callback import callback_handler

    return callback_handler
