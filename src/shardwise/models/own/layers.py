"""Layers that several models share. Each initialises its own parameters in `reset_parameters`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.shapes import GPTShape, ViTShape
from shardwise.state.checkpoint.padded_rows import PaddedRows


class Linear(nn.Linear):
    """A linear layer whose initial weights are N(0, std²) and whose initial bias is 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        normal(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding whose initial rows are N(0, std²)."""

    def __init__(self, num_rows: int, width: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_rows, width)

    def reset_parameters(self) -> None:
        normal(self.weight, std=self.std)


class TokenEmbedding(Embedding, PaddedRows):
    """The embedding of a vocabulary, padded to `num_rows` rows. The padding is 0 and never read.

    The initial weights are the same as without padding.
    """

    def __init__(self, vocab_size: int, width: int, *, num_rows: int) -> None:
        self.vocab_size = vocab_size
        super().__init__(num_rows, width)

    def reset_parameters(self) -> None:
        _reset_rows(self.weight, vocab_size=self.vocab_size, std=self.std)


class TokenHead(Linear, PaddedRows):
    """The logits of a vocabulary, padded to `num_rows` columns.

    A padding logit is the lowest finite number, so its probability is exactly 0 in every dtype. The gradient of the
    padding rows is therefore 0: they are 0 and stay 0, also under weight decay.
    """

    def __init__(self, width: int, vocab_size: int, *, num_rows: int) -> None:
        self.vocab_size = vocab_size
        super().__init__(width, num_rows, bias=False)

    def reset_parameters(self) -> None:
        _reset_rows(self.weight, vocab_size=self.vocab_size, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.out_features > self.vocab_size:
            # Hidden from autograd, which would copy all gradients only to set these to 0; they are 0 already.
            with torch.no_grad():
                logits[..., self.vocab_size :] = torch.finfo(logits.dtype).min
        return logits


def normal(weight: Tensor, *, std: float) -> None:
    """Fill it with N(0, std²). On the meta device, where there is nothing to fill, torch would take long for it."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def _reset_rows(weight: Tensor, *, vocab_size: int, std: float) -> None:
    with torch.no_grad():
        normal(weight[:vocab_size], std=std)
        weight[vocab_size:].zero_()


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, shape: GPTShape | ViTShape, *, causal: bool, out_std: float) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.causal = causal
        self.dropout = shape.dropout
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class FeedForward(nn.Module):
    """A linear layer to four times the width, GELU, and a linear layer back."""

    def __init__(self, width: int, *, out_std: float, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return out


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): the block of GPT-2 and of ViT."""

    def __init__(
        self, shape: GPTShape | ViTShape, *, causal: bool, norm_eps: float, out_std: float, approximate: str
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=norm_eps)
        self.attention = SelfAttention(shape, causal=causal, out_std=out_std)
        self.norm2 = nn.LayerNorm(shape.width, eps=norm_eps)
        self.feed_forward = FeedForward(shape.width, out_std=out_std, approximate=approximate)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.feed_forward(self.norm2(x)))
        return x
