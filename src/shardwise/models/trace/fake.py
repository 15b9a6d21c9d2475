"""Parameters, buffers and batches without storage: the same shapes, strides and ties on a fake `cpu`."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.base.torch_internals.torch_private import BatchNorm, FakeTensorMode
from shardwise.program.spec.step import FP8_WAYS
from shardwise.program.units.carried_tensors import carried_tensors

COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    # Parameters keep their dtypes.
    "native": None,
    "autocast": torch.float32,
    **dict.fromkeys(FP8_WAYS, torch.bfloat16),
}
"""Way of computing → dtype of parameters; float16 needs as many bytes as bfloat16."""


@contextmanager
def fake_model(
    model: nn.Module, *, mode: FakeTensorMode, computes_in: str, without: Iterable[nn.Module] = ()
) -> Iterator[None]:
    """Inside, the model's parameters and buffers are fake, and floating-point parameters have their compute dtype.

    Ties are kept. BatchNorm always computes in fp32. Modules `without` are skipped with all of their parts: they will
    not be called.
    """
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    fakes: dict[int, Tensor] = {}
    skipped = {id(part) for module in without for part in module.modules()}
    try:
        for module in model.modules():
            dtype = COMPUTE_DTYPES[computes_in]
            if dtype is not None and isinstance(module, BatchNorm):
                dtype = torch.float32
            tables: list[dict[str, Any]] = [module._parameters, module._buffers] if id(module) not in skipped else []
            for table in tables:
                for name, tensor in [(name, tensor) for name, tensor in table.items() if tensor is not None]:
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _fake_of(tensor, mode=mode, dtype=dtype)
                    before.append((table, name, tensor))
                    table[name] = fakes[id(tensor)]
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


def _fake_of(tensor: Tensor, *, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    chosen = tensor.dtype
    if dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
        chosen = dtype
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=chosen, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return fake
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if carried_tensors(tensor):
            # The quantization state of a quantised weight.
            vars(parameter).update(_fake_inside(vars(tensor), mode=mode))
        return parameter


def _fake_inside(attributes: dict[str, Any], *, mode: FakeTensorMode) -> dict[str, Any]:
    """Return the attributes, and those of objects in them, with fake tensors."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            value = _fake_of(value, mode=mode, dtype=None)
        elif any(isinstance(inner, Tensor) for inner in getattr(value, "__dict__", {}).values()):
            value, inside = copy.copy(value), vars(value)
            vars(value).update(_fake_inside(inside, mode=mode))
        found[name] = value
    return found


def fake_batch(batch: Any, *, mode: FakeTensorMode) -> Any:
    """Return the batch without its values; tensors of one storage still share one."""
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        with mode:
            if key not in storages:
                size = storage.nbytes() // tensor.element_size()
                storages[key] = torch.empty(size, dtype=tensor.dtype, device="cpu")
            return storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tree_map_only(Tensor, fake, batch)
