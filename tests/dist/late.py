"""Collectives that are as late as the contract allows: the adversary that the engine is tested against.

A real collective is often done before the place where a wait was forgotten, so the mistake shows once in a
thousand steps. Here the buffer holds NaN from issue to wait, and only `wait` delivers the result:

    issue    the real collective starts on a private copy; all of the buffer that is not input becomes NaN
    wait     LateError if anybody wrote, freed or reused the buffer meanwhile; then the result is copied in

So a missing wait, an early free or a buffer used twice fails on every run, on a CPU.
"""

import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups.collectives import Collectives, Work
from shardwise.comm.groups.groups import Group

# Bytes of all ones are a NaN in every floating-point format; as an integer they would be a plausible -1.
_NAN_BYTE = 0xFF
_GARBAGE_BYTE = 0xA5

# A collective's name, the elements of its buffer, the ranks of its group.
Issued = tuple[str, int, tuple[int, ...]]
# Elements [start, stop) of a buffer.
_Span = tuple[int, int]


class LateError(RuntimeError):
    """The contract of `Collectives` was broken: a bug of the engine, not a mistake of the user."""


class LateCollectives:
    """`inner`, with every result held back until `wait`, and there for up to `max_delay_seconds` more."""

    def __init__(self, inner: Collectives, *, seed: int, max_delay_seconds: float = 0.002) -> None:
        self.issued: list[Issued] = []
        self._inner = inner
        self._random = random.Random(seed)
        self._max_delay_seconds = max_delay_seconds
        self._pending: list[LateWork] = []

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        def start(private: Tensor) -> Work:
            return self._inner.all_gather(private, group=group)

        own = _own_span(buffer, group=group)
        return self._issue("all_gather", buffer, group=group, start=start, given=own, result=_whole(buffer))

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        def start(private: Tensor) -> Work:
            return self._inner.reduce_scatter(private, group=group)

        # The other slices are undefined afterwards, and stay NaN so that nobody uses them.
        own = _own_span(buffer, group=group)
        return self._issue("reduce_scatter", buffer, group=group, start=start, given=(0, 0), result=own)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        def start(private: Tensor) -> Work:
            return self._inner.all_reduce(private, group=group)

        return self._issue("all_reduce", buffer, group=group, start=start, given=(0, 0), result=_whole(buffer))

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        def start(private: Tensor) -> Work:
            return self._inner.broadcast(private, source=source, group=group)

        given = _whole(buffer) if group.index == source else (0, 0)
        return self._issue("broadcast", buffer, group=group, start=start, given=given, result=_whole(buffer))

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        private_sent = sent.clone()
        # Until the wait nobody may read what was handed over either.
        _poison(sent.data.view(-1))

        def start(private: Tensor) -> Work:
            return self._inner.all_to_all(
                private, private_sent, received_sizes=received_sizes, sent_sizes=sent_sizes, group=group
            )

        issued = self._issue("all_to_all", received, group=group, start=start, given=(0, 0), result=_whole(received))
        # Ranks have different shares of it.
        self.issued[-1] = ("all_to_all", 0, group.ranks)
        return issued

    def assert_all_waited(self) -> None:
        """LateError with the names of the works that nobody has waited for."""
        names = [work.name for work in self._pending if not work.waited]
        if names:
            raise LateError(f"{len(names)} collectives were not waited for: {'; '.join(names)}")

    def assert_same_order(self, group: Group) -> None:
        """LateError unless the group's ranks issued the same collectives in the same order; itself a collective.

        Looks at what was issued over exactly these ranks: two swapped all-reduces of equal size give wrong
        sums in silence, and a rank alone cannot see it.
        """
        mine = [issued for issued in self.issued if issued[2] == group.ranks]
        sequences: list[list[Issued]] = [[] for _ in group.ranks]
        dist.all_gather_object(sequences, mine, group=group.handle)
        for rank, sequence in zip(group.ranks, sequences, strict=True):
            if sequence != sequences[0]:
                _raise_difference(sequences[0], sequence, ranks=(group.ranks[0], rank))

    def _issue(
        self,
        kind: str,
        buffer: Tensor,
        *,
        group: Group,
        start: Callable[[Tensor], Work],
        given: _Span,
        result: _Span,
    ) -> Work:
        """Start the collective on a copy of `buffer`, in which `given` is input and `result` will be output."""
        name = f"{kind} of {buffer.numel()} elements over ranks {group.ranks} (number {len(self.issued)})"
        if not buffer.is_contiguous():
            raise LateError(f"{name}: the buffer is not contiguous")
        self._pending = [work for work in self._pending if not work.waited]
        for work in self._pending:
            if work.overlaps(buffer):
                raise LateError(f"{name}: the buffer is still in use by {work.name}: wait for that first")
        self.issued.append((kind, buffer.numel(), group.ranks))
        private = buffer.data.clone()
        late = LateWork(
            name,
            inner=start(private),
            private=private,
            buffer=buffer,
            given=given,
            result=result,
            delay_seconds=self._random.uniform(0, self._max_delay_seconds),
        )
        self._pending.append(late)
        return late


class LateWork:
    """A collective whose result is delivered by `wait`."""

    def __init__(
        self,
        name: str,
        *,
        inner: Work,
        private: Tensor,
        buffer: Tensor,
        given: _Span,
        result: _Span,
        delay_seconds: float,
    ) -> None:
        self.name = name
        self.waited = False
        self._inner = inner
        self._private = private
        self._buffer = buffer
        self._result = result
        self._delay_seconds = delay_seconds
        self._address, self._num_bytes = buffer.data_ptr(), buffer.nbytes
        self._storage_bytes = buffer.untyped_storage().nbytes()
        # Beneath autograd, as a backend writes: `data` shares the memory but not the version counter.
        flat = buffer.data.view(-1)
        _poison(flat[: given[0]])
        _poison(flat[given[1] :])
        self._as_left = _bytes_of(buffer).clone()

    def overlaps(self, buffer: Tensor) -> bool:
        """Whether `buffer` lies in this work's memory."""
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        return max(start, self._address) < min(stop, self._address + self._num_bytes)

    def wait(self) -> None:
        if self.waited:
            return
        time.sleep(self._delay_seconds)
        self._inner.wait()
        self._check_memory()
        self._check_content()
        start, stop = self._result
        self._buffer.data.view(-1)[start:stop] = self._private.view(-1)[start:stop]
        self.waited = True
        del self._private, self._as_left, self._buffer, self._inner

    def _check_memory(self) -> None:
        storage_bytes = self._buffer.untyped_storage().nbytes()
        if storage_bytes != self._storage_bytes:
            raise LateError(
                f"{self.name}: the buffer was freed or resized before the wait: "
                f"its storage had {self._storage_bytes} bytes and has {storage_bytes}"
            )
        if self._buffer.data_ptr() != self._address:
            raise LateError(f"{self.name}: the buffer was freed and allocated again before the wait")

    def _check_content(self) -> None:
        changed = _bytes_of(self._buffer) != self._as_left
        if changed.any():
            element = int(changed.nonzero()[0]) // self._buffer.element_size()
            raise LateError(f"{self.name}: element {element} of the buffer was written before the wait")


def _whole(buffer: Tensor) -> _Span:
    return 0, buffer.numel()


def _own_span(buffer: Tensor, *, group: Group) -> _Span:
    """Where `own_slice` lies."""
    size = buffer.numel() // group.size
    return group.index * size, (group.index + 1) * size


def _poison(part: Tensor) -> None:
    part.view(torch.uint8).fill_(_NAN_BYTE if part.is_floating_point() else _GARBAGE_BYTE)


def _bytes_of(buffer: Tensor) -> Tensor:
    return buffer.data.view(-1).view(torch.uint8)


def _raise_difference(expected: list[Issued], found: list[Issued], *, ranks: tuple[int, int]) -> None:
    """LateError that shows the first collective in which two ranks differ."""
    pairs = zip(expected, found, strict=False)
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    first, second = (_describe(issued, number=number) for issued in (expected, found))
    raise LateError(
        f"ranks issued different collectives: as number {number}, rank {ranks[0]} {first} and rank {ranks[1]} {second}"
    )


def _describe(issued: list[Issued], *, number: int) -> str:
    if number >= len(issued):
        return "nothing"
    kind, num_elements, _ = issued[number]
    return f"{kind} of {num_elements} elements"
