"""Our own ring collectives on send and receive: explained in the docs, selectable, and tested against the backend.

Each rank only sends to its right neighbour and receives from its left one. An all-reduce on three ranks, whose buffers
are cut into three slices:

    rank              0         1         2
    round 0 sends     slice 2   slice 0   slice 1      what arrives is added to the rank's own values,
    round 1 sends     slice 1   slice 2   slice 0      and the sum is sent on in the next round
    has the sum of    slice 0   slice 1   slice 2      reduce-scatter ends here
    round 2 sends     slice 0   slice 1   slice 2      what arrives is kept unchanged, and sent on;
    round 3 sends     slice 2   slice 0   slice 1      these rounds alone are the all-gather

Every element is summed along one path, so its bits are the same on all ranks.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups.collectives import Work
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.issued import NotedWork


def ring_all_reduce(buffer: Tensor, *, group: Group) -> None:
    """Replace `buffer`, of any size, by the sum over the ranks.

    2(n-1) rounds, each moving num_bytes/n over the slowest link:
    t = 2(n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    num_rounds = group.size - 1
    _send_around(buffer, group=group, first=group.index - 1, num_added=num_rounds, num_kept=num_rounds)


def ring_reduce_scatter(buffer: Tensor, *, group: Group) -> None:
    """Replace slice i of rank i by the sum over the ranks; the other slices become partial sums.

    The first half of an all-reduce: t = (n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    _send_around(buffer, group=group, first=group.index - 1, num_added=group.size - 1, num_kept=0)


def ring_all_gather(buffer: Tensor, *, group: Group) -> None:
    """Fill slice i of `buffer` from rank i, for all i.

    The second half of an all-reduce: t = (n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    _send_around(buffer, group=group, first=group.index, num_added=0, num_kept=group.size - 1)


def ring_broadcast(buffer: Tensor, *, source: int, group: Group) -> None:
    """Pass `buffer` of the group's `source`-th rank from neighbour to neighbour.

    n-1 hops: t = (n-1) · (latency + num_bytes / bandwidth).
    """
    sent = _bytes_of(buffer.data.view(-1))
    num_hops = (group.index - source) % group.size
    if num_hops > 0:
        dist.recv(sent, group=group.handle, group_src=_left(group))
    if num_hops < group.size - 1:
        dist.send(sent, group=group.handle, group_dst=_right(group))


def _send_around(buffer: Tensor, *, group: Group, first: int, num_added: int, num_kept: int) -> None:
    """Send slices around the ring.

    In round k this rank sends slice `first - k` (modulo n) and receives slice `first - k - 1`, which it sends in round
    k + 1. What it receives is added to its own values in the first `num_added` rounds, and replaces them in the
    `num_kept` rounds that follow.
    """
    # `data` shares the memory but not the version counter: backends, too, write without autograd noticing.
    flat = buffer.data.view(-1)
    bounds = [part * len(flat) // group.size for part in range(group.size + 1)]
    slices = [flat[start:stop] for start, stop in itertools.pairwise(bounds)]
    for round_ in range(num_added + num_kept):
        outgoing, own = (slices[(first - round_ - later) % group.size] for later in (0, 1))
        incoming = torch.empty_like(own) if round_ < num_added else own
        # As one batch: on GPUs two single calls can block each other.
        send = dist.P2POp(dist.isend, _bytes_of(outgoing), group=group.handle, group_peer=_right(group))
        receive = dist.P2POp(dist.irecv, _bytes_of(incoming), group=group.handle, group_peer=_left(group))
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if round_ < num_added:
            own.add_(incoming)


def _right(group: Group) -> int:
    return (group.index + 1) % group.size


def _left(group: Group) -> int:
    return (group.index - 1) % group.size


def _bytes_of(part: Tensor) -> Tensor:
    """View values as bytes: backends do not send every dtype."""
    return part.view(torch.uint8)


class RingCollectives:
    """The ring as `Collectives`. On a CPU, each group has a thread that runs its calls in the order of issue.

    After a call has failed, the neighbours no longer agree on whose turn it is: every later call of that group fails.
    """

    def __init__(self) -> None:
        self._lanes: dict[dist.ProcessGroup, _Lane] = {}

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        _check_equal_slices(buffer, group=group)
        return self._issue(buffer, group=group, call=lambda: ring_all_gather(buffer, group=group))

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        _check_equal_slices(buffer, group=group)
        return self._issue(buffer, group=group, call=lambda: ring_reduce_scatter(buffer, group=group))

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        return self._issue(buffer, group=group, call=lambda: ring_all_reduce(buffer, group=group))

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        return self._issue(buffer, group=group, call=lambda: ring_broadcast(buffer, source=source, group=group))

    def all_to_all(
        self, received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
    ) -> Work:
        """Call the backend's: each piece is for one rank alone, so it has no way around the ring."""
        sizes = list(received_sizes), list(sent_sizes)

        def call() -> None:
            dist.all_to_all_single(received.data, sent.data, *sizes, group=group.handle)

        return self._issue(received, group=group, call=call, is_uneven=True)

    def _issue(self, buffer: Tensor, *, group: Group, call: Callable[[], None], is_uneven: bool = False) -> Work:
        # Checked here, not on the thread: the caller's mistake is raised where it is made, and breaks no group.
        if not buffer.is_contiguous():
            raise ValueError(f"a buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not contiguous")
        name = group.log.note(None if is_uneven else buffer)
        if buffer.device.type != "cpu":
            call()
            return NotedWork(_StreamWork(device=buffer.device), name)
        if group.handle not in self._lanes:
            self._lanes[group.handle] = _LANES.setdefault(group.handle, _Lane())
        return NotedWork(_LaneWork(self._lanes[group.handle].submit(call)), name)


def _check_equal_slices(buffer: Tensor, *, group: Group) -> None:
    if buffer.numel() % group.size != 0:
        raise ValueError(f"a buffer of {buffer.numel()} elements has no {group.size} equal slices")


class _Lane:
    """The thread that runs the calls of one group in order; it ends with the last reference to this."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ring")
        self._failure: BaseException | None = None

    def submit(self, call: Callable[[], None]) -> Future[None]:
        return self._executor.submit(self._run, call)

    def _run(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise RuntimeError("an earlier ring collective of this group failed") from self._failure
        try:
            call()
        except BaseException as error:
            self._failure = error
            raise


_LANES: WeakValueDictionary[dist.ProcessGroup, _Lane] = WeakValueDictionary()
"""By group: models share their groups, and messages of two threads in one group would be taken for each other."""


class _LaneWork:
    """A call on a lane's thread; `wait` raises what was raised there."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _StreamWork:
    """A call on a GPU: complete when the stream on which it was issued reaches this point."""

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._issued = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._issued)
