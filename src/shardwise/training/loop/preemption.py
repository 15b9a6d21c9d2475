"""Requests to stop (SIGTERM, SIGHUP, SIGUSR1): the ranks agree on the step after which they all save and stop.

A signal may reach one rank alone, or each rank in another step, and a rank that saved alone would wait for ever. So
after every step each rank sends whether it has been signalled, and reads the answer one step later (step_flags.py).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.comm.groups.step_flags import StepFlags
from shardwise.training.launch.stop_signals import STOP_SIGNALS

SAME_REQUEST_SECONDS = 1.0
_STOP = "stop"


class Preemption:
    """A request to stop: if any rank was signalled, all ranks learn of it after the same step.

    flags   what ranks exchange after each step; others may add to it
    """

    def __init__(self, *, grace_seconds: float) -> None:
        self._signalled = False
        self.flags = StepFlags()
        self.flags.register(_STOP, lambda: int(self._signalled))
        self._grace_seconds = grace_seconds
        self._timer: threading.Timer | None = None

    def agreed(self) -> bool:
        """Return whether any rank had been signalled at its last call. Collective: after each step, on every rank."""
        self.flags.exchange()
        return bool(self.flags.agreed[_STOP])

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; the same one again, or the end of the grace time, kills the process as usual.

        A cluster may signal the launcher and its ranks, and the launcher signals the ranks again: signals within
        SAME_REQUEST_SECONDS are one request. Waiting here and restoring the default leaves the rest to the kernel,
        which can end a process even if its main thread hangs in a collective and runs no handler.
        """
        self._signalled = True
        if self._timer is None:
            self._timer = threading.Timer(self._grace_seconds, os.kill, (os.getpid(), number))
            self._timer.daemon = True
            self._timer.start()
        signal.signal(number, signal.SIG_IGN)
        time.sleep(SAME_REQUEST_SECONDS)
        signal.signal(number, signal.SIG_DFL)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextmanager
def preemption(*, grace_seconds: float) -> Iterator[Preemption]:
    """Treat STOP_SIGNALS as a request to save and stop, within the block. Collective: it makes a group.

    Only a process's main thread can handle signals; on another thread they keep their effect. A SIGHUP that is ignored
    (nohup) stays ignored.
    """
    request = Preemption(grace_seconds=grace_seconds)
    on_main_thread = threading.current_thread() is threading.main_thread()
    numbers = STOP_SIGNALS if on_main_thread else ()
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, request.handle)
    # The ranks of our launcher block the signals until here, and again once they have saved (rank_process.py).
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield request
        request.flags.close()
    finally:
        request.cancel_timer()
        if on_main_thread:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
