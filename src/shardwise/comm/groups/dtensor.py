"""Handles torch's DTensors without importing them: the import takes most of a second."""

import sys
from typing import Any

from torch import Tensor


def dtensor_types() -> tuple[type[Any], ...]:
    """Return DTensor for isinstance, or nothing if its module was never imported, so that no DTensor can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor is returned as it is."""
    part: Tensor = tensor.to_local() if isinstance(tensor, dtensor_types()) else tensor
    return part
