"""GPT-2's architecture."""

import math

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.own.layers import Embedding, PreNormBlock, TokenEmbedding, TokenHead
from shardwise.models.shapes import GPTShape


class Block(PreNormBlock):
    """One causal transformer block.

    The initial weights of its two output projections are divided by √(2L), so that the variance of the residual stream
    does not grow with the number of layers (GPT-2, section 2.3).
    """

    def __init__(self, shape: GPTShape) -> None:
        out_std = 0.02 / math.sqrt(2 * shape.num_layers)
        super().__init__(shape, causal=True, norm_eps=1e-5, out_std=out_std, approximate="tanh")


class GPT(nn.Module):
    """Tokens [batch, seq] → logits [batch, seq, shape.vocab_rows]; logits past the vocabulary have probability 0."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = TokenEmbedding(shape.vocab_size, shape.width, num_rows=shape.vocab_rows)
        self.positions = Embedding(shape.max_seq, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = TokenHead(shape.width, shape.vocab_size, num_rows=shape.vocab_rows)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.shape.max_seq:
            raise InvalidModel(f"{seq} tokens per sample; this GPT has {self.shape.max_seq} positions")
        x = self.embed(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
