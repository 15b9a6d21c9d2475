"""What the core asks of its guests, which attach themselves: it imports none of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import Work


class HostMemory(Protocol):
    """Host memory from and to which the device copies while it computes (offload/transfer.py).

    keeps_grads   gradients stay on the device, through which the update passes what it steps
    loading       copies from host memory in this block while the device computes; after an update's event, unless None
    arrival       returns what is waited for until everything that was loaded so far is there and gathered; then calls
                  `then`
    settle        waits until an update has written host memory
    fetch         starts to copy a tensor of the device; the result may be read after `land`
    land          waits until everything that was fetched has arrived
    """

    keeps_grads: bool

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor: ...

    def loading(self, *, after: Any) -> AbstractContextManager[None]: ...

    def arrival(self, gathering: Work | None, *, then: Callable[[], None]) -> Work: ...

    def settle(self, update: Any) -> None: ...

    def fetch(self, source: Tensor) -> Tensor: ...

    def land(self) -> None: ...


class NarrowBuffer(Protocol):
    """The bytes of a full buffer some of whose weights are gathered in fewer bits (fp8/fp8_bytes.py).

    lay_out    returns what the parameters are views of
    own        notes what this rank owns: (parameter, start, stop) in its slice of the masters, which `staged` holds
    load_own   casts that into its place
    """

    def lay_out(self, full: Tensor) -> list[Tensor]: ...

    def own(self, parts: Sequence[tuple[int, int, int]], *, own_full: Tensor, staged: Tensor) -> None: ...

    def load_own(self) -> None: ...


class Scales(Protocol):
    """The scales of such weights (fp8/fp8_scales.py).

    stale     values were written since the scales were last refreshed
    cover     uses the buffers that the units hold now
    refresh   agrees on the scales of the masters with the other ranks, unless there is only one
    """

    stale: bool

    def cover(self) -> None: ...

    def refresh(self, *, is_local: bool) -> None: ...


class WorkBeside(Protocol):
    """Updates that run while the device computes."""

    def join(self) -> None:
        """Let the computation wait for all of it."""
