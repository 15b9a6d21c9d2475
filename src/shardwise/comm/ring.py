"""Our own ring collectives on send and receive: what the docs explain, selectable, and tested against the backend.

Each rank only ever sends to its right neighbour and receives from its left one. An all-reduce on three ranks,
whose buffers are cut into three slices:

    rank              0         1         2
    round 0 sends     slice 2   slice 0   slice 1      what arrives is added to the own values,
    round 1 sends     slice 1   slice 2   slice 0      and the sum is sent on in the next round
    has the sum of    slice 0   slice 1   slice 2      reduce-scatter ends here
    round 2 sends     slice 0   slice 1   slice 2      what arrives is kept as it is, and sent on;
    round 3 sends     slice 2   slice 0   slice 1      these rounds alone are the all-gather

Every element is summed along one path, so its bits are the same on all ranks.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import Work
from shardwise.comm.groups import Group
from shardwise.comm.issued import NotedWork

# Small enough that one piece is added while the next arrives, large enough that the cost of a message does not show.
_PIECE_BYTES = 4 * 2**20
# Pieces that are asked for ahead, so that no neighbour has to wait until it is asked; bounds the scratch memory.
_MAX_AHEAD = 4


def ring_all_reduce(buffer: Tensor, *, group: Group) -> None:
    """`buffer` becomes the sum over the ranks; its size need not be a multiple of theirs.

    2(n-1) rounds, each moving num_bytes/n over the slowest link:
    t = 2(n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    rounds = group.size - 1
    _go_round(buffer, path=_Path(group=group, first=group.index - 1, num_added=rounds, num_kept=rounds))


def ring_reduce_scatter(buffer: Tensor, *, group: Group) -> None:
    """Slice i of rank i becomes the sum over the ranks; the other slices become partial sums.

    The first half of an all-reduce: t = (n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    _check_equal_slices(buffer, group=group)
    _go_round(buffer, path=_Path(group=group, first=group.index - 1, num_added=group.size - 1, num_kept=0))


def ring_all_gather(buffer: Tensor, *, group: Group) -> None:
    """Slice i of `buffer` is taken from rank i, for all i.

    The second half of an all-reduce: t = (n-1) · (latency + num_bytes / (n · bandwidth)).
    """
    _check_equal_slices(buffer, group=group)
    _go_round(buffer, path=_Path(group=group, first=group.index, num_added=0, num_kept=group.size - 1))


def ring_broadcast(buffer: Tensor, *, source: int, group: Group) -> None:
    """`buffer` is taken from the group's `source`-th rank, and handed from neighbour to neighbour.

    n-1 hops; while a piece is on hop h, the one after it is on hop h-1. With p pieces:
    t = (n-2+p) · (latency + num_bytes / (p · bandwidth)).
    """
    _check_contiguous(buffer)
    num_hops = (group.index - source) % group.size
    pieces = _cut(buffer.data.view(-1), num_parts=_num_pieces(buffer.nbytes))
    incoming = [_receive(piece, group=group) for piece in pieces] if num_hops > 0 else []
    outgoing = []
    for number, piece in enumerate(pieces):
        if num_hops > 0:
            incoming[number].wait()
        if num_hops < group.size - 1:
            outgoing.append(_send(piece, group=group))
    for work in outgoing:
        work.wait()


def direct_all_to_all(
    received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
) -> None:
    """The i-th piece of `sent` goes to rank i, and the i-th of `received` comes from there.

    Not around the ring: each piece is for one rank alone, and goes straight there. What stays is copied.
    """
    outgoing = torch.split(sent.data, list(sent_sizes))
    incoming = torch.split(received.data, list(received_sizes))
    incoming[group.index].copy_(outgoing[group.index])
    calls = []
    for distance in range(1, group.size):
        to, source = (group.index + distance) % group.size, (group.index - distance) % group.size
        for call, part, peer in ((dist.isend, outgoing[to], to), (dist.irecv, incoming[source], source)):
            if part.numel():
                calls.append(dist.P2POp(call, _bytes_of(part), group=group.handle, group_peer=peer))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Which slices pass through this rank.

    In round k it sends slice `first - k` (modulo n) and receives slice `first - k - 1`, which is what it sends in
    round k + 1. What it receives is added to its own values in the first `num_added` rounds, and replaces
    them in the `num_kept` rounds that follow.
    """

    group: Group
    first: int
    num_added: int
    num_kept: int

    @property
    def num_rounds(self) -> int:
        return self.num_added + self.num_kept

    def sent(self, round_: int) -> int:
        return (self.first - round_) % self.group.size

    def received(self, round_: int) -> int:
        return self.sent(round_ + 1)


def _go_round(buffer: Tensor, *, path: _Path) -> None:
    _check_contiguous(buffer)
    if path.num_rounds == 0:
        return  # a ring of one
    # Beneath autograd, as a backend writes: `data` shares the memory but not the version counter.
    slices = _cut(buffer.data.view(-1), num_parts=path.group.size)
    if buffer.device.type == "cpu":
        num_pieces = _num_pieces(max(part.nbytes for part in slices))
        _go_round_in_pieces(slices, path=path, num_pieces=num_pieces)
    else:
        _go_round_in_slices(slices, path=path)


def _go_round_in_slices(slices: list[Tensor], *, path: _Path) -> None:
    """The plain version: one message a round, and the link is idle while we add."""
    for round_ in range(path.num_rounds):
        mine = slices[path.received(round_)]
        arrived = torch.empty_like(mine) if round_ < path.num_added else mine
        _exchange(slices[path.sent(round_)], arrived, group=path.group)
        if round_ < path.num_added:
            mine.add_(arrived)


def _go_round_in_pieces(slices: list[Tensor], *, path: _Path, num_pieces: int) -> None:
    """The same sums, with each slice cut into pieces: one is added while the next one arrives.

    A piece is sent on as soon as it is complete; nobody waits for the end of a round. Messages between two
    neighbours keep their order, so they need no tags: both sides go piece by piece, round by round.
    """
    pieces = [_cut(part, num_parts=num_pieces) for part in slices]
    longest = max(len(piece) for parts in pieces for piece in parts)
    num_ahead = min(_MAX_AHEAD, num_pieces)
    scratch = slices[0].new_empty((num_ahead if path.num_added else 0, longest))
    num_messages = path.num_rounds * num_pieces

    def ask_for(message: int) -> _Arrival:
        round_, number = divmod(message, num_pieces)
        mine = pieces[path.received(round_)][number]
        place = scratch[message % num_ahead, : len(mine)] if round_ < path.num_added else mine
        return _Arrival(work=_receive(place, group=path.group), place=place, mine=mine)

    arrivals = deque(ask_for(message) for message in range(num_ahead))
    outgoing = [_send(piece, group=path.group) for piece in pieces[path.sent(0)]]
    for message in range(num_messages):
        arrival = arrivals.popleft()
        arrival.work.wait()
        if message < path.num_added * num_pieces:
            arrival.mine.add_(arrival.place)
        if message + num_pieces < num_messages:
            outgoing.append(_send(arrival.mine, group=path.group))
        if message + num_ahead < num_messages:
            arrivals.append(ask_for(message + num_ahead))
    for work in outgoing:
        work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A piece under way to this rank, the place where it will lie, and this rank's own values of it."""

    work: Work
    place: Tensor
    mine: Tensor


def _exchange(outgoing: Tensor, incoming: Tensor, *, group: Group) -> None:
    """Send to the right and receive from the left, as one batch: on GPUs two single calls can block each other."""
    send = dist.P2POp(dist.isend, _bytes_of(outgoing), group=group.handle, group_peer=_right(group))
    receive = dist.P2POp(dist.irecv, _bytes_of(incoming), group=group.handle, group_peer=_left(group))
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _send(part: Tensor, *, group: Group) -> Work:
    work: Work | None = dist.isend(_bytes_of(part), group=group.handle, group_dst=_right(group))
    assert work is not None
    return work


def _receive(part: Tensor, *, group: Group) -> Work:
    work: Work | None = dist.irecv(_bytes_of(part), group=group.handle, group_src=_left(group))
    assert work is not None
    return work


def _right(group: Group) -> int:
    return (group.index + 1) % group.size


def _left(group: Group) -> int:
    return (group.index - 1) % group.size


def _bytes_of(part: Tensor) -> Tensor:
    """What is sent: backends do not carry every dtype."""
    return part.view(torch.uint8)


def _cut(flat: Tensor, *, num_parts: int) -> list[Tensor]:
    """Views of `flat` end to end, whose lengths differ by at most 1."""
    bounds = [part * len(flat) // num_parts for part in range(num_parts + 1)]
    return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


def _num_pieces(num_bytes: int) -> int:
    return max(1, math.ceil(num_bytes / _PIECE_BYTES))


def _check_contiguous(buffer: Tensor) -> None:
    if not buffer.is_contiguous():
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not contiguous")


def _check_equal_slices(buffer: Tensor, *, group: Group) -> None:
    if buffer.numel() % group.size != 0:
        raise ValueError(f"a buffer of {buffer.numel()} elements has no {group.size} equal slices")


class RingCollectives:
    """The ring as `Collectives`. A group's calls run one after another, as issued, on a thread of its own.

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
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        def call() -> None:
            direct_all_to_all(received, sent, received_sizes=received_sizes, sent_sizes=sent_sizes, group=group)

        return self._issue(received, group=group, call=call, is_uneven=True)

    def _issue(self, buffer: Tensor, *, group: Group, call: Callable[[], None], is_uneven: bool = False) -> Work:
        # Here, not on the thread: the caller's mistake is raised where it is made, and breaks no group.
        _check_contiguous(buffer)
        name = group.log.note(None if is_uneven else buffer)
        if buffer.device.type != "cpu":
            call()
            return NotedWork(_StreamWork(device=buffer.device), name)
        if group.handle not in self._lanes:
            self._lanes[group.handle] = _Lane()
        return NotedWork(self._lanes[group.handle].issue(call), name)


class _Lane:
    """Runs the calls of one group in order; ends with the last reference to it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ring")
        self._failure: BaseException | None = None

    def issue(self, call: Callable[[], None]) -> Work:
        return _LaneWork(self._executor.submit(self._run, call))

    def _run(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise RuntimeError("an earlier ring collective of this group failed") from self._failure
        try:
            call()
        except BaseException as error:
            self._failure = error
            raise


class _LaneWork:
    """A call on a lane's thread; `wait` raises what was raised there."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _StreamWork:
    """A GPU's call: done when the stream on which it was issued comes to this point."""

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._issued = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._issued)
