"""What the core asks of host memory in which units keep their states."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.collectives import Work


class HostMemory(Protocol):
    """Host memory from and to which the device copies while it computes (offload/transfer.py).

    `keeps_grads`: gradients stay on the device, through which the update passes what it steps.
    """

    keeps_grads: bool

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor: ...

    def loading(self, *, after: Any) -> AbstractContextManager[None]:
        """Copy from host memory in this block while the device computes; after an update's event, unless None."""
        ...

    def arrival(self, gathering: Work | None, *, then: Callable[[], None]) -> Work:
        """Return what is waited for until everything that was loaded so far is there and gathered; `then` is called."""
        ...

    def settle(self, update: Any) -> None:
        """Wait until an update has written host memory."""
        ...

    def fetch(self, source: Tensor) -> Tensor:
        """Start to copy a tensor of the device; the result may be read after `land`."""
        ...

    def land(self) -> None:
        """Wait until everything that was fetched has arrived."""
        ...
