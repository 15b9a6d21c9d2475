"""Whether somebody writes into the slices that an optimizer steps, outside of its step.

torch counts the writes to a tensor (`_version`), and the views of a buffer share one count. Writes through `p.data` are
not counted, so that between two updates slices have a class that notices `p.data`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import InvalidModel

# torch's own property, which `Slice.data` stands in front of.
_DATA: Any = torch._C.TensorBase.__dict__["data"]


class Slice(nn.Parameter):
    """What an optimizer steps, between two updates: `p.data` is noticed, and cannot be replaced.

    During an update it is a plain Parameter: by exact class, torch's optimizers choose their fast implementations.
    """

    _lend: Callable[[], None]

    @property
    def data(self) -> Tensor:
        self._lend()
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise InvalidModel(
            "p.data = … of a slice in optimizer.param_groups takes it out of the model's memory: write into it "
            "(p.copy_(…)) inside `with shardwise.edit(model):`"
        )


class MasterWrites:
    """Whether anybody but the engine wrote into a master since `settled`."""

    def __init__(self, master: Tensor) -> None:
        self._master = master
        self._count = master._version
        self._found = False
        self._lent: Tensor | None = None

    def before_own(self) -> None:
        """The engine is about to write: what was written so far was not by the engine."""
        if self.counted:
            self._found = True

    def after_own(self) -> None:
        self._count = self._master._version

    def lend(self) -> None:
        """From here on writes may be uncounted."""
        if self._lent is None:
            self._lent = self._master.clone()

    @property
    def counted(self) -> bool:
        """Whether torch has counted a write, by an update or by anybody else."""
        return self._master._version != self._count

    @property
    def found(self) -> bool:
        if self._lent is not None:
            # By bits, because NaN is not equal to itself.
            self._found = self._found or not torch.equal(self._lent.view(torch.uint8), self._master.view(torch.uint8))
            self._lent = None
        return self._found or self.counted

    def settled(self) -> None:
        """Whatever was written has been taken care of."""
        self._found = False
        self._lent = None
        self._count = self._master._version
