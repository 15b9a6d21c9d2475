"""Layers that several models share. Each fills its own parameters in `reset_parameters`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose weights start as N(0, std²) and whose bias starts as 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding whose rows start as N(0, std²)."""

    def __init__(self, num_rows: int, width: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(Embedding):
    """The embedding of a vocabulary, in `num_rows` rows: those past it are 0, and no token reads them.

    The random numbers are those of an embedding without them.
    """

    def __init__(self, vocab_size: int, width: int, *, num_rows: int) -> None:
        self.vocab_size = vocab_size
        super().__init__(num_rows, width)

    def reset_parameters(self) -> None:
        _reset_rows(self.weight, vocab_size=self.vocab_size, std=self.std)


class TokenHead(Linear):
    """Logits of a vocabulary, in `num_rows` columns.

    Those past it are the lowest finite number: their probability is exactly 0 in every dtype, and so is the gradient
    of their rows, which are 0 and stay 0 (weight decay included).
    """

    def __init__(self, width: int, vocab_size: int, *, num_rows: int) -> None:
        self.vocab_size = vocab_size
        super().__init__(width, num_rows, bias=False)

    def reset_parameters(self) -> None:
        _reset_rows(self.weight, vocab_size=self.vocab_size, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.out_features > self.vocab_size:
            # Autograd need not know: it would copy all gradients only to set these to the 0 that they are.
            with torch.no_grad():
                logits[..., self.vocab_size :] = torch.finfo(logits.dtype).min
        return logits


def _reset_rows(weight: Tensor, *, vocab_size: int, std: float) -> None:
    with torch.no_grad():
        weight[:vocab_size].normal_(std=std)
        weight[vocab_size:].zero_()


def vocabularies(model: nn.Module) -> dict[str, int]:
    """Parameters with a row for each token → how many tokens there are; rows past them are padding."""
    return {
        f"{path}.weight": module.vocab_size
        for path, module in model.named_modules()
        if isinstance(module, TokenEmbedding | TokenHead)
    }


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, *, num_heads: int, causal: bool, dropout: float, out_std: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class FeedForward(nn.Module):
    """Four times as wide inside, with a GELU between."""

    def __init__(self, width: int, *, out_std: float, approximate: str = "none") -> None:
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
        self,
        width: int,
        *,
        num_heads: int,
        causal: bool,
        dropout: float,
        norm_eps: float,
        out_std: float,
        approximate: str,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = SelfAttention(width, num_heads=num_heads, causal=causal, dropout=dropout, out_std=out_std)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.feed_forward = FeedForward(width, out_std=out_std, approximate=approximate)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.feed_forward(self.norm2(x)))
        return x
