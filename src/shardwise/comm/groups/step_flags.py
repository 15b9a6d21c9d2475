"""Small numbers that ranks exchange once per step without waiting: the largest of all ranks, read one step later.

Each exchange is an asynchronous all-reduce of a few integers on its own Gloo group. Its answer is read at the next
exchange, when it has long arrived: no rank waits, and no GPU is involved. The answer is the same on every rank, so
ranks that decide by it decide alike.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.comm.groups.groups import job_timeout


class StepFlags:
    """Named numbers; `agreed` are the largest of all ranks at the last exchange but one.

    Making it is collective. Every rank registers the same names in the same order, before the first exchange.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=job_timeout())
        self._sources: dict[str, Callable[[], int]] = {}
        self.agreed: dict[str, int] = {}
        self._sent: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def register(self, name: str, source: Callable[[], int]) -> None:
        """Add a number to every exchange. Until the first answer arrives, what it is now counts as agreed."""
        assert self._sent is None, "registered after the first exchange"
        self._sources[name] = source
        self.agreed[name] = source()

    def exchange(self) -> None:
        """Read the last answer, then send the numbers. Collective: every rank calls it once after each step."""
        self._read()
        self._sent = torch.tensor([source() for source in self._sources.values()], dtype=torch.int64)
        self._work = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _read(self) -> None:
        if self._work is None or self._sent is None:
            return
        self._work.wait()
        self._work = None
        self.agreed = dict(zip(self._sources, self._sent.tolist(), strict=True))

    def close(self) -> None:
        """Read the last answer, so that its all-reduce is over, and destroy the group. Collective."""
        if self._group is not None:
            self._read()
            dist.destroy_process_group(self._group)
            self._group = None
