"""What the tests of memory measure with."""

from torch import Tensor

from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.comm.groups.groups import Group


class LiveTensors(LiveBytes):
    """Bytes of live tensors, without what a kernel takes for itself, which depends on the processor."""

    def __init__(self) -> None:
        super().__init__(with_scratch=False)


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Silent:
    """Collectives that do nothing: the same memory, and no thread of a backend that frees some of it unseen."""

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Done:
        return Done()

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Done:
        return Done()

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Done:
        if not buffer.is_floating_point():
            # The flags of used parameters: no rank differs.
            buffer.fill_(1)
        return Done()

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Done:
        return Done()

    def all_to_all(
        self, received: Tensor, sent: Tensor, *, received_sizes: list[int], sent_sizes: list[int], group: Group
    ) -> Done:
        return Done()
