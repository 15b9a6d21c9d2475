"""A model of equal blocks, and collectives that one rank issues wrongly: all of equal size, so that no backend notices."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.groups.collectives import Collectives, Work
from shardwise.comm.groups.groups import Group

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Blocks(nn.Module):
    """Nothing but blocks: all that is gathered and reduced is of one size."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WrongCollectives:
    """`inner`'s, but for the second of a kind (`gather`, `reduce`) once it is armed.

    swap    it is issued before the first
    skip    it is left out
    extra   it is issued twice
    """

    def __init__(self, inner: Collectives, *, fault: str) -> None:
        self.inner = inner
        self.fault, self.kind = fault.split()
        self.armed = False
        self._num_seen = 0
        self._held: _Held | None = None

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return self._issue("gather", self.inner.all_gather, buffer, group)

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return self._issue("reduce", self.inner.reduce_scatter, buffer, group)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        if buffer.dtype != torch.float32:
            return self.inner.all_reduce(buffer, group=group)
        return self._issue("reduce", self.inner.all_reduce, buffer, group)

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        return self.inner.broadcast(buffer, source=source, group=group)

    def _issue(self, kind: str, call: Any, buffer: Tensor, group: Group) -> Work:
        self._num_seen += self.armed and kind == self.kind
        if not self.armed or kind != self.kind or self._num_seen > 2:
            return call(buffer, group=group)
        if self.fault == "swap" and self._num_seen == 1:
            self._held = _Held(lambda: call(buffer, group=group))
            return self._held
        if self.fault == "skip" and self._num_seen == 2:
            return _Held(lambda: None)
        if self.fault == "extra" and self._num_seen == 2:
            call(buffer.clone(), group=group)
        work = call(buffer, group=group)
        if self._held is not None:
            self._held.issue()
        return work


class _Held:
    """A collective that is not issued yet."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.work: Work | None = None
        self.issued = False

    def issue(self) -> None:
        if not self.issued:
            self.issued = True
            self.work = self.call()

    def wait(self) -> None:
        self.issue()
        if self.work is not None:
            self.work.wait()
