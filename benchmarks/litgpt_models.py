"""litgpt's models with adapters, as of its resource tables (2023), as Tasks for `python:FILE.py:function`.

Which tensors its code keeps for backward decides its memory, so that is written as litgpt has it:
- queries, keys and values are one product, and the values stay a view of it
- its adapter for queries and values is padded to that product by index_copy, which keeps what it copies
- RMS norms in single operations, in fp32; adapters with dropout
- the head and the cross-entropy in chunks of 128 tokens; Fabric casts what the model returns to fp32
- quantised layers are bitsandbytes' of that year: a product keeps its input, and a weight is unpacked to fp16 and then
  cast
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import adapted  # noqa: F401  (registers the operation that unpacks NF4)
from shardwise.models.tasks import Task

_RANK, _DROPOUT, _CHUNK = 8, 0.05, 128
# bitsandbytes: bytes per element of NF4, with scales in fp32 for every 64, or in int8 with their own (double).
_PACKED = {"nf4": 0.5 + 4 / 64, "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`norms`: per block; without `is_llama`, GPT-NeoX's: layer norms, biases, GELU, both branches in parallel."""

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    vocabulary: int
    length: int
    is_llama: bool = True
    norms: int = 2
    rotary: float = 1.0
    has_head_bias: bool = False


SHAPES = {
    "phi_15": Shape(
        num_layers=24, width=2048, num_heads=32, hidden=8192, vocabulary=51200, length=1044, is_llama=False, norms=1,
        rotary=0.5, has_head_bias=True,
    ),
    "stablelm_3b": Shape(
        num_layers=16, width=4096, num_heads=32, hidden=16384, vocabulary=50688, length=1034, is_llama=False,
        rotary=0.25,
    ),
    "llama_2_7b": Shape(num_layers=32, width=4096, num_heads=32, hidden=11008, vocabulary=32000, length=1304),
    "llama_2_13b": Shape(num_layers=40, width=5120, num_heads=40, hidden=13824, vocabulary=32000, length=1304),
}  # fmt: skip


class _PackedProduct(torch.autograd.Function):
    """x · Wᵀ that keeps x, although W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(x, packed)
        ctx.sizes = rows, columns
        return F.linear(x, _unpacked(packed, rows, columns))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        _, packed = ctx.saved_tensors
        return grad @ _unpacked(packed, *ctx.sizes), None, None, None


def _unpacked(packed: Tensor, rows: int, columns: int) -> Tensor:
    weight: Tensor = torch.ops.shardwise.dequantize_nf4(packed, packed, rows, columns, torch.float16)
    return weight.to(torch.bfloat16)


class PackedLinear(nn.Module):
    """A frozen linear layer in NF4."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, per_element: float) -> None:
        super().__init__()
        self.sizes = outputs, inputs
        size = round(outputs * inputs * per_element)
        self.packed = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _PackedProduct.apply(x, self.packed, *self.sizes)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.qkv = linear(width, 3 * width, bias=not shape.is_llama)
        self.out = linear(width, width, bias=not shape.is_llama)
        self.lora_down = nn.Parameter(torch.empty(2 * _RANK, width))
        self.lora_up = nn.Parameter(torch.empty(2 * width, _RANK))

    def _padded(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, 2 · width) with zeros for the keys."""
        width = self.shape.width
        by_token = x.transpose(0, 1)
        places = torch.arange(2 * width, device=x.device)
        zeros = x.new_zeros(by_token.shape[0] * by_token.shape[1], 3 * width)
        filled = zeros.index_copy(1, places, by_token.reshape(-1, 2 * width))
        return filled.view(*by_token.shape[:-1], 3 * width).transpose(0, 1)

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        some = round(self.shape.width / self.shape.num_heads * self.shape.rotary)
        first = x[..., :some]
        half = torch.cat((-first[..., some // 2 :], first[..., : some // 2]), dim=-1)
        turned = (first * angles + half * angles).type_as(x)
        return torch.cat((turned, x[..., some:]), dim=-1)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        down = F.linear(F.dropout(x, _DROPOUT), self.lora_down)
        up = F.conv1d(down.transpose(-2, -1), self.lora_up.unsqueeze(-1), groups=2).transpose(-2, -1)
        qkv = self.qkv(x) + self._padded(up) * 2.0
        heads = qkv.view(batch, length, self.shape.num_heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.squeeze(2) for part in heads.split(1, dim=2))
        q, k = self._turned(q, angles), self._turned(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        norm = RootMeanSquareNorm if shape.is_llama else nn.LayerNorm
        self.norm1 = norm(shape.width)
        self.norm2 = norm(shape.width) if shape.norms == 2 else None
        self.attention = Attention(shape, linear)
        bias = not shape.is_llama
        self.up = linear(shape.width, shape.hidden, bias=bias)
        self.gate = linear(shape.width, shape.hidden, bias=bias) if shape.is_llama else None
        self.down = linear(shape.hidden, shape.width, bias=bias)

    def _mlp(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        first = self.norm1(x)
        mixed = self.attention(first, angles)
        if self.shape.is_llama:
            x = mixed + x
            assert self.norm2 is not None
            return self._mlp(self.norm2(x)) + x
        return self._mlp(first if self.norm2 is None else self.norm2(x)) + mixed + x


class Model(nn.Module):
    """Tokens → logits, in chunks."""

    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(shape.num_layers))
        self.norm = (RootMeanSquareNorm if shape.is_llama else nn.LayerNorm)(shape.width)
        self.head = linear(shape.width, shape.vocabulary, bias=shape.has_head_bias)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.embedding(tokens)
        some = round(self.shape.width / self.shape.num_heads * self.shape.rotary)
        angles = torch.zeros(tokens.shape[1], some, device=x.device)
        for block in self.blocks:
            x = block(x, angles)
        return [self.head(part) for part in self.norm(x).split(_CHUNK, dim=1)]


def chunked_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    chunks = [chunk.float() for chunk in model(tokens)]
    losses = [
        F.cross_entropy(chunk.flatten(0, 1), wanted.flatten(), reduction="none")
        for chunk, wanted in zip(chunks, tokens.split(_CHUNK, dim=1), strict=True)
    ]
    return torch.cat(losses).mean()


def _task(shape: Shape, *, quantised: str) -> Task:
    def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        if quantised:
            return PackedLinear(inputs, outputs, bias=bias, per_element=_PACKED[quantised])
        return nn.Linear(inputs, outputs, bias=bias)

    with torch.device("meta"):
        model = Model(shape, linear)
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return Task(
        model=model,
        loss=chunked_loss,
        make_batch=lambda size: torch.zeros(size, shape.length, dtype=torch.long),
    )


# llama_2_7b, llama_2_7b_nf4, llama_2_7b_nf4_dq …: a shape, and how its linear layers are stored.
globals().update(
    {
        "_".join(filter(None, (name, stored.replace("-", "_")))): partial(_task, shape, quantised=stored)
        for name, shape in SHAPES.items()
        for stored in ("", *_PACKED)
    }
)
