"""Linear layers that multiply in fp8, for a trace: the engine's own layers on fake tensors, so that the trace has what
they save for backward and what their casts allocate."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardwise.engine.fp8 import linear
from shardwise.engine.fp8.casts import E4M3
from shardwise.engine.fp8.linear import Fp8Linear, GatheredLinear, RowwiseLinear, TensorwiseLinear, fp8_class
from shardwise.program.spec.step import GATHERED, ROWWISE, TENSORWISE

_LINEARS: dict[str, type[Fp8Linear]] = {
    GATHERED: GatheredLinear,
    TENSORWISE: TensorwiseLinear,
    ROWWISE: RowwiseLinear,
}


@contextmanager
def fp8_layers(model: nn.Module, *, weights: Collection[str], computes_in: str, device: str) -> Iterator[None]:
    """Inside, the layers of these weights multiply in fp8, by the kernels of `device`."""
    kind = _LINEARS.get(computes_in)
    if kind is None:
        yield
        return
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(patch.object(linear, "product", linear.hardware_product))
        for name in weights:
            module = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(module, nn.Linear)
            stack.enter_context(_in_fp8(module, kind=kind))
        yield


@contextmanager
def _in_fp8(module: nn.Linear, *, kind: type[Fp8Linear]) -> Iterator[None]:
    own: Any = type(module)
    # Frozen weights are gathered in bf16 (program/buffers.py).
    is_gathered = kind is GatheredLinear and module.weight.requires_grad
    base: Any = TensorwiseLinear if kind is GatheredLinear and not is_gathered else kind
    shape = module.weight.shape
    module.__class__ = fp8_class(own, base=base)
    if is_gathered:
        # As buffers, so that the trace takes them as given: in a run they are views of the flat buffer.
        module.register_buffer("fp8_weight", torch.empty(shape, dtype=E4M3, device="meta"), persistent=False)
        module.register_buffer("fp8_inverse", torch.empty((), device="meta"), persistent=False)
    try:
        yield
    finally:
        module.__class__ = own
        for name in ("fp8_weight", "fp8_inverse"):
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
