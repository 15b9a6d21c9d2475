"""What runs while the device computes: copies from and to host memory in which units keep their states."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.collectives import Work


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


class WorkBeside(Protocol):
    """Updates that run while the device computes."""

    def join(self) -> None:
        """Let the computation wait for all of it."""
