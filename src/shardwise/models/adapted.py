"""A model as LoRA or QLoRA trains it, for tracing: a frozen base, and low-rank adapters on linear layers of its blocks.

LoRA      W·x + B·(A·x) · scale, as PEFT computes it, without dropout; the base is in the dtype that computes
nf4       each of those W as bitsandbytes' NF4 with double quantisation: half a byte per element and a byte for every
          64, sharded and whole respectively; W is unpacked for each product, in forward and in backward
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.specs.spec_request import Adaptation
from shardwise.state.checkpoint.hugging_face import LAYOUTS

# bitsandbytes: elements per scale, and scales per scale of scales.
_BLOCK, _OUTER_BLOCK = 64, 256
# The values of both codes, and the mean of the scales.
_CODE, _OUTER_CODE = 16, 256


@torch.library.custom_op("shardwise::dequantize_nf4", mutates_args=())
def _dequantize(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    raise NotImplementedError("only traced, never computed")


@_dequantize.register_fake
def _(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(rows, columns, dtype=dtype)


class _Product(torch.autograd.Function):
    """x · Wᵀ with a packed W, which is unpacked again in backward; x is not kept, since W has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.sizes = (rows, columns)
        return F.linear(x, _dequantize(packed, scales, rows, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad @ _dequantize(*ctx.saved_tensors, *ctx.sizes, grad.dtype), None, None, None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is packed."""

    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.sizes = linear.out_features, linear.in_features
        count = linear.weight.numel()
        num_scales = -(-count // _BLOCK)
        packed = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta")
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        num_outer = 4 * (-(-num_scales // _OUTER_BLOCK) + _CODE + _OUTER_CODE + 1)
        self.register_buffer("scales", torch.empty(num_scales + num_outer, dtype=torch.uint8, device="meta"), False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.packed, self.scales, *self.sizes)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class LoraLinear(nn.Module):
    """A frozen linear layer, and two narrow trained ones whose product is added to it."""

    def __init__(self, base: nn.Module, *, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta", dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0
        return out


def adapt(model: nn.Module, adaptation: Adaptation, *, name: str) -> None:
    """Freeze the model, and give its linear layers adapters. The model is on the meta device and stays there."""
    linears = list(linears_of_blocks(model))
    known = sorted({path.rpartition(".")[2] for path, _, _ in linears})
    wanted = {_own_name(target, known=known) for target in adaptation.targets}
    missing = [target for target in adaptation.targets if _own_name(target, known=known) not in known]
    if missing or not linears:
        raise InvalidModel(
            f"--lora-targets {','.join(missing)}: {name} has no linear layers of this name in its blocks; it has "
            f"{', '.join(known) or 'none at all'}"
        )
    model.requires_grad_(False)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(getattr(torch, adaptation.base))
                assert module._parameters[key] is parameter
    for path, parent, linear in linears:
        child = path.rpartition(".")[2]
        base: nn.Module = Nf4Linear(linear) if adaptation.quantize else linear
        if not wanted or child in wanted:
            base = LoraLinear(
                base,
                inputs=linear.in_features,
                outputs=linear.out_features,
                rank=adaptation.rank,
                dtype=getattr(torch, adaptation.dtype),
            )
        setattr(parent, child, base)


def linears_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Yield (path, parent, layer) of every linear layer inside a numbered block."""
    for path, parent in list(model.named_modules()):
        for child, module in list(parent.named_children()):
            if isinstance(module, nn.Linear) and re.search(r"(^|\.)\d+(\.|$)", path):
                yield f"{path}.{child}", parent, module


def _own_name(target: str, *, known: list[str]) -> str:
    """Return our name of a layer that Hugging Face calls `target` (q_proj → q), where the model is one of ours."""
    if target in known:
        return target
    names = {
        theirs.rpartition(".")[2]: ours.rpartition(".")[2] for one in LAYOUTS for ours, theirs in one.modules.items()
    }
    return names.get(target, target)
