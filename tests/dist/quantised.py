"""Quantised weights as torchao and bitsandbytes make them, and a model with adapters around them."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64


class Scaled(Tensor):
    """As torchao's: a tensor subclass around whole numbers and a scale for each row, of another dtype."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32, device=whole.device)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["whole", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Scaled":
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, *_ = arguments
            return x @ (weight.whole.float() * weight.scale).T.to(x.dtype)
        return super().__torch_function__(function, types, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        aten = torch.ops.aten
        assert function in (aten.detach.default, aten.alias.default, aten.clone.default), function
        return cls(function(arguments[0].whole), function(arguments[0].scale))


class Int8Weight(nn.Parameter):
    """As bitsandbytes': its own memory a second time as an attribute, and the scales as another."""

    def __new__(cls, data: Tensor, scales: Tensor) -> "Int8Weight":
        self = torch.Tensor._make_subclass(cls, data, False)
        self.CB, self.SCB = data, scales
        return self


class _State:
    CB: Tensor | None = None
    SCB: Tensor | None = None


class Int8Linear(nn.Module):
    """The first forward takes the bytes over into a state; each one makes them the weight's data."""

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = Int8Weight(whole, scale)
        self.state = _State()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        self.weight.data = self.state.CB
        return x @ (self.state.CB.float() * self.state.SCB).T.to(x.dtype)


def _subclass() -> nn.Module:
    base = nn.Linear(WIDTH, WIDTH, bias=False)
    base.weight = nn.Parameter(Scaled(*_whole_and_scale()), requires_grad=False)
    return base


def _int8() -> nn.Module:
    return Int8Linear(*_whole_and_scale())


def _whole_and_scale() -> tuple[Tensor, Tensor]:
    whole = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
    return whole, torch.rand(WIDTH, 1) * 0.003


def _bitsandbytes_nf4() -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    base = Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4")
    data = torch.randn(WIDTH, WIDTH) * 0.1
    base.weight = Params4bit(data, requires_grad=False, quant_type="nf4", compress_statistics=True).to("cpu")
    return base


def _bitsandbytes_int8() -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    base = Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    base.weight = Int8Params(torch.randn(WIDTH, WIDTH) * 0.1, requires_grad=False, has_fp16_weights=False).to("cpu")
    return base


def _torchao_int8() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    quantize_(base, Int8WeightOnlyConfig())
    return base


_BASES = {
    "subclass": _subclass,
    "int8": _int8,
    "bitsandbytes nf4": _bitsandbytes_nf4,
    "bitsandbytes int8": _bitsandbytes_int8,
    "torchao int8": _torchao_int8,
}


class Adapted(nn.Module):
    """A frozen quantised weight, and two small matrices that are trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = _BASES[kind]()
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + x @ self.down.T @ self.up.T)


class QuantisedNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found
