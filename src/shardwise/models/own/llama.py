"""Llama's architecture: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.own.layers import Linear, TokenEmbedding, TokenHead
from shardwise.models.shapes import LlamaShape, RopeScaling


class RotaryPositions(nn.Module):
    """Rotary positions: rotates the pairs (i, i + half) of each head by an angle proportional to the position."""

    inverse_frequency: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.theta = shape.rope_theta
        self.scaling = shape.rope_scaling
        # Not saved, because it is computed from the shape.
        self.register_buffer("inverse_frequency", torch.empty(self.head_width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        exponent = torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width
        frequency = 1.0 / self.theta**exponent
        if self.scaling is not None:
            frequency = _stretch(frequency, self.scaling)
        with torch.no_grad():
            self.inverse_frequency.copy_(frequency)

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [seq, head_width / 2], in fp32: bf16 cannot tell positions beyond 256 apart."""
        positions = torch.arange(seq, device=self.inverse_frequency.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequency.float())
        return angles.cos(), angles.sin()


def _stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Multiply long wavelengths by the factor, keep short ones, and interpolate between them (Llama 3.1)."""
    turns = scaling.original_max_seq * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequency / scaling.factor * (1 - keep) + frequency * keep


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, seq, head_width] by the angles of its positions."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: causal, with several query heads per head of keys and values."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_width = shape.width // shape.num_heads
        kv_width = shape.num_kv_heads * self.head_width
        self.q = Linear(shape.width, shape.width, bias=False)
        self.k = Linear(shape.width, kv_width, bias=False)
        self.v = Linear(shape.width, kv_width, bias=False)
        self.out = Linear(shape.width, shape.width, bias=False, std=_out_std(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, seq, count, self.head_width).transpose(1, 2)

        q = rotate(heads(self.q(x), self.num_heads), cos, sin)
        k = rotate(heads(self.k(x), self.num_kv_heads), cos, sin)
        v = heads(self.v(x), self.num_kv_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = Linear(shape.width, shape.ffn_width, bias=False)
        self.up = Linear(shape.width, shape.ffn_width, bias=False)
        self.down = Linear(shape.ffn_width, shape.width, bias=False, std=_out_std(shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.norm2 = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.feed_forward = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        x = x + self.feed_forward(self.norm2(x))
        return x


class Llama(nn.Module):
    """Tokens [batch, seq] → logits [batch, seq, shape.vocab_rows]; logits past the vocabulary have probability 0."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = TokenEmbedding(shape.vocab_size, shape.width, num_rows=shape.vocab_rows)
        self.rotary = RotaryPositions(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = TokenHead(shape.width, shape.vocab_size, num_rows=shape.vocab_rows)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.shape.max_seq:
            raise InvalidModel(f"{seq} tokens per sample; this Llama was made for {self.shape.max_seq}")
        cos, sin = self.rotary(seq)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _out_std(shape: LlamaShape) -> float:
    # As in GPT-2: the initial weights of output projections are divided by √(2L).
    return 0.02 / math.sqrt(2 * shape.num_layers)
