"""Tensors that were made under torch.inference_mode: torch counts no writes to them, and allows none outside of it."""

from collections.abc import Mapping

import torch
from torch import Tensor


def normal(tensor: Tensor) -> Tensor:
    """Return the tensor; in place of an inference tensor, a normal one in the same memory."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def versions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return, by name, the id of each tensor and torch's count of writes to it; 0 for an inference tensor."""
    return {name: (id(tensor), 0 if tensor.is_inference() else tensor._version) for name, tensor in tensors.items()}


def uncounted(tensors: Mapping[str, Tensor]) -> str:
    """Return, in one line, which of these tensors is an inference tensor; "" if none is."""
    found = next((name for name, tensor in tensors.items() if tensor.is_inference()), "")
    return f"{found} is an inference tensor, to which torch does not count writes" if found else ""
