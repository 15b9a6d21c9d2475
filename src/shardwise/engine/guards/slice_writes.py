"""Whether somebody writes into the slices that an optimizer steps, outside of its step.

torch counts the writes to a tensor (`_version`), and the views of a buffer share one count. Writes through `p.data` are
not counted, so that between two updates slices have a class that notices `p.data` (the counts: core/master_writes.py).
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
