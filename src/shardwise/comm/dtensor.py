"""torch's DTensors, known without being imported: that takes the better part of a second, and who has none need not."""

import sys
from typing import Any

from torch import Tensor


def dtensor_types() -> tuple[type[Any], ...]:
    """For isinstance: DTensor, or nothing as long as nobody has imported it, and so has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; of any other tensor, all of it."""
    part: Tensor = tensor.to_local() if isinstance(tensor, dtensor_types()) else tensor
    return part
