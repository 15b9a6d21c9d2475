"""SIGTERM and SIGHUP: the ranks agree after which step to stop, so that all of them come to the last checkpoint.

A signal may reach one rank alone, or each in another step, and a rank that saved alone would wait for ever. So each
rank sends "I was told" after every step in an all-reduce of one number on a Gloo group of its own, and reads the answer
a step later, when it has long arrived: no rank waits, and no GPU is asked.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

SAME_REQUEST_SECONDS = 1.0


class Preemption:
    """Whether any rank was told to stop, the same answer on all of them."""

    def __init__(self, *, group: dist.ProcessGroup, grace_seconds: float) -> None:
        self._group = group
        self._grace_seconds = grace_seconds
        self._told = False
        self._sent: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._timer: threading.Timer | None = None

    def agreed(self) -> bool:
        """Whether any rank had been told when it last called this. Collective: after each step, on every rank."""
        stop = self._answer()
        self._sent = torch.tensor([int(self._told)])
        self._work = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def _answer(self) -> bool:
        if self._work is None or self._sent is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._sent.item())

    def tell(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: the first is noted; the next one, or the end of the grace time, kills as ever.

        A cluster may signal the launcher and its ranks, and the launcher then tells the ranks again: what comes at
        about the same time is one request. Waiting for it here leaves the rest to the kernel, which can end a process
        also where its main thread hangs in a collective and runs no handler.
        """
        self._told = True
        self._timer = threading.Timer(self._grace_seconds, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
        signal.signal(number, signal.SIG_IGN)
        time.sleep(SAME_REQUEST_SECONDS)
        signal.signal(number, signal.SIG_DFL)

    def end(self) -> None:
        """Where the ranks end well: read the last answer, so that nobody takes the group away from under it."""
        self._answer()
        dist.destroy_process_group(self._group)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextmanager
def preemption(*, grace_seconds: float) -> Iterator[Preemption]:
    """Take SIGTERM and SIGHUP for a request to save and stop, within the block. Collective, as it makes a group.

    Signals can only be taken on a process's main thread; on another one they keep what they do. A SIGHUP that is
    ignored (nohup) stays so.
    """
    request = Preemption(group=dist.new_group(backend="gloo"), grace_seconds=grace_seconds)
    on_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP] if on_main_thread else []
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, request.tell)
    # Our launcher's ranks hold them back until here, and again once they have saved (rank_process.py).
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield request
        request.end()
    finally:
        request.cancel_timer()
        if on_main_thread:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
