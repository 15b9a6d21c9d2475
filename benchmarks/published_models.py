"""Models of published measurements that are not in the catalogue, as Tasks for `python:FILE.py:function`.

GPT-2 and BERT are written as `transformers` had them in 2021: attention in single operations, dropout everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.catalogue import shape_of
from shardwise.models.own.llama import Llama
from shardwise.models.shapes import LlamaShape
from shardwise.models.tasks import Task, cross_entropy, token_task

# Lightning's demo


VOCABULARY, WIDTH, LENGTH = 33_278, 1024, 35


class Transformer(nn.Module):
    """An encoder and a decoder of 32 layers each, as in Lightning's comparison of strategies: 1 B parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=64,
            num_encoder_layers=32,
            num_decoder_layers=32,
            dim_feedforward=4 * WIDTH,
            dropout=0.2,
            batch_first=True,
        )
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), float("-inf"), device=tokens.device).triu(1)
        source = target = self.embedding(tokens) * math.sqrt(WIDTH)
        logits: Tensor = self.decoder(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))
        return F.log_softmax(logits, dim=-1)


def transformer_1b() -> Task:
    with torch.device("meta"):
        model = Transformer()
    return Task(
        model=model,
        loss=lambda model, batch: F.nll_loss(model(batch).flatten(0, 1), batch.flatten()),
        make_batch=lambda size: torch.zeros(size, LENGTH, dtype=torch.long),
    )


# GPT-2 and BERT with attention in single operations


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape:
    """`num_predicted`: the tokens of a sample whose logits are computed, all where it is None, none where it is 0.

    `is_causal`: GPT-2 (norms first, its gelu in single operations), and BERT otherwise.
    """

    num_layers: int
    width: int
    num_heads: int
    length: int
    vocabulary: int
    num_predicted: int | None = None
    is_causal: bool = False


class SingleOperationAttention(nn.Module):
    """Attention as matrix products, a mask, a softmax and dropout."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.register_buffer("mask", torch.ones(1, 1, shape.length, shape.length, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        num_heads = self.shape.num_heads
        q, k, v = (
            part.view(batch, length, num_heads, width // num_heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // num_heads)
        if self.shape.is_causal:
            scores = torch.where(self.mask, scores, torch.tensor(-1e4, dtype=scores.dtype))
        else:
            scores = scores + torch.zeros(batch, 1, 1, length, dtype=scores.dtype)
        mixed = F.dropout(F.softmax(scores, dim=-1), 0.1) @ v
        return F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1)


class TextBlock(nn.Module):
    """One block."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention = SingleOperationAttention(shape)
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape.is_causal:
            x = x + self.attention(self.norm1(x))
            return x + F.dropout(self.down(_gelu_in_operations(self.up(self.norm2(x)))), 0.1)
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


def _gelu_in_operations(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class TextModel(nn.Module):
    """Tokens → logits of the tokens that are predicted, or of two classes."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(max(shape.length, 512), shape.width)
        self.blocks = nn.ModuleList(TextBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        if shape.num_predicted == 0:
            self.head = nn.Linear(shape.width, 2)
        else:
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = F.dropout(x if self.shape.is_causal else self.norm(x), 0.1)
        for block in self.blocks:
            x = block(x)
        if self.shape.num_predicted is not None:
            x = x[:, : max(self.shape.num_predicted, 1)]
        logits: Tensor = self.head(self.norm(x) if self.shape.is_causal else x)
        return logits


def _text_task(shape: TextShape) -> Task:
    with torch.device("meta"):
        model = TextModel(shape)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
        # Not in fp32, as `transformers` did not then either; autocast sees to it by itself.
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Task(model=model, loss=loss, make_batch=lambda size: torch.zeros(size, shape.length, dtype=torch.long))


def _gpt2(num_layers: int, width: int, num_heads: int) -> Callable[[], Task]:
    shape = TextShape(
        num_layers=num_layers, width=width, num_heads=num_heads, length=1024, vocabulary=50257, is_causal=True
    )
    return lambda: _text_task(shape)


def _bert(num_layers: int, width: int, *, num_predicted: int = 0) -> Callable[[], Task]:
    shape = TextShape(
        num_layers=num_layers,
        width=width,
        num_heads=width // 64,
        length=128,
        vocabulary=30528,
        num_predicted=num_predicted,
    )
    return lambda: _text_task(shape)


gpt2_124m, gpt2_medium, gpt2_large, gpt2_xl = (
    _gpt2(*sizes) for sizes in ((12, 768, 12), (24, 1024, 16), (36, 1280, 20), (48, 1600, 25))
)
distilbert, bert_base, bert_large = _bert(6, 768), _bert(12, 768), _bert(24, 1024)
bert_pretraining = _bert(24, 1024, num_predicted=20)


# Llama beyond the catalogue, and with low-rank adapters


def _llama(name: str) -> LlamaShape:
    shape = shape_of(name)
    assert isinstance(shape, LlamaShape)
    return shape


LLAMA_2_34B = replace(_llama("llama-2-70b"), num_layers=48, ffn_width=22016)
LLAMA_32_3B = replace(_llama("llama-3.2-1b"), num_layers=28, width=3072, num_heads=24, max_seq=4096)
QWEN_25_7B = replace(
    _llama("llama-2-7b"), num_layers=28, width=3584, num_heads=28, num_kv_heads=4, ffn_width=18944, vocab_size=152064
)


def _with_usual_loss(task: Task) -> Task:
    """The catalogue's own loss writes over the logits; others' keeps them."""
    return replace(task, loss=cross_entropy)


def llama_2_34b() -> Task:
    return _with_usual_loss(token_task(LLAMA_2_34B, seq=4096, device="meta"))


class NormInOperations(nn.RMSNorm):
    """The norm in fp32 and in single operations, of which backward keeps the input in fp32 and the result."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def llama_32_3b() -> Task:
    """Whole in bf16, as torchtune trains it."""
    task = _with_usual_loss(token_task(LLAMA_32_3B, seq=4096, device="meta"))
    task.model.to(torch.bfloat16)
    return task


def llama_32_3b_in_operations() -> Task:
    """The same with norms in operations, as torchtune has them; a compiler fuses them."""
    task = llama_32_3b()
    for module in task.model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = NormInOperations
    return task


class Adapted(nn.Module):
    """A frozen linear layer, and the product of two narrow ones added to it."""

    def __init__(self, linear: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.up(self.down(x)) * 2.0
        return out


def _lora(shape: LlamaShape, *, length: int, rank: int) -> Callable[[], Task]:
    """Whole in bf16, frozen but for the adapters of all linear layers in blocks.

    Automodel's kernels for adapters make their dropout on the way, and its loss keeps no second copy of the logits.
    """

    def task() -> Task:
        made = token_task(replace(shape, max_seq=length), seq=length, device="meta")
        model = made.model
        assert isinstance(model, Llama)
        model.to(torch.bfloat16).requires_grad_(False)
        with torch.device("meta"):
            for block in model.blocks:
                for name in ("q", "k", "v", "out", "gate", "up", "down"):
                    part = block.attention if name in ("q", "k", "v", "out") else block.feed_forward
                    setattr(part, name, Adapted(getattr(part, name), rank=rank))
        return made

    return task


llama_31_8b_lora = _lora(_llama("llama-3.1-8b"), length=4096, rank=16)
qwen_25_7b_lora = _lora(QWEN_25_7B, length=4096, rank=16)
