"""Llama as torchtitan had it in 2024, for `python:FILE.py:function`: what its published rows ran.

It differs from the catalogue's in three ways that take time:

- pairs of queries and keys are turned as complex numbers, in three kernels instead of ten
- keys and values that heads share are repeated before attention
- `selective op` recomputes a block, but for attention and every second matrix product, beginning with the first

(pytorch/torchtitan, torchtitan/models/llama/model.py and torchtitan/parallelisms/parallelize_llama.py of 2024.)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.models.catalogue import shape_of
from shardwise.models.own.llama import Attention, Llama, RotaryPositions
from shardwise.models.shapes import LlamaShape
from shardwise.models.tasks import Task, cross_entropy, token_task

_PRODUCT = torch.ops.aten.mm.default
_ATTENTIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


class ComplexPositions(RotaryPositions):
    """e^(i · angle) of each position and pair, instead of its cosine and its sine."""

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(seq)
        turns = torch.complex(cos, sin)
        return turns, turns


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [batch, seq, heads, head width], whose neighbours are a pair."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None, :]).flatten(-2).type_as(x)


class RepeatingAttention(nn.Module):
    """Attention with a head of keys and values for each head of queries, whatever its parameters say."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = attention.q, attention.k, attention.v, attention.out
        self.head_width = attention.head_width
        self.num_repeats = attention.num_heads // attention.num_kv_heads

    def forward(self, x: Tensor, turns: Tensor, _: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.q, self.k, self.v))
        q, k = _turned(q, turns), _turned(k, turns)
        if self.num_repeats > 1:
            k, v = (y.repeat_interleave(self.num_repeats, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _every_second_product() -> Any:
    """The two contexts of one call of a block: of its forward, and of its recomputation."""
    num_products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operation in _ATTENTIONS
        if operation is _PRODUCT:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recompute_operations(block: nn.Module) -> None:
    plain = block.forward

    def forward(*inputs: Tensor) -> Any:
        return checkpoint(
            plain, *inputs, use_reentrant=False, context_fn=_every_second_product, preserve_rng_state=False
        )

    block.forward = forward  # type: ignore[method-assign]


def _llama(name: str, *, length: int, selective_op: bool = False) -> Callable[[], Task]:
    shape = shape_of(name)
    assert isinstance(shape, LlamaShape)

    def task() -> Task:
        made = token_task(replace(shape, vocab_multiple=1), seq=length, device="meta")
        model = made.model
        assert isinstance(model, Llama)
        with torch.device("meta"):
            model.rotary = ComplexPositions(model.shape)
        for block in model.blocks:
            block.attention = RepeatingAttention(block.attention)
            if selective_op:
                _recompute_operations(block)
        return replace(made, loss=cross_entropy)

    return task


llama_2_13b, llama_2_13b_op = (_llama("llama-2-13b", length=4096, selective_op=op) for op in (False, True))
llama_2_70b, llama_2_70b_op = (_llama("llama-2-70b", length=4096, selective_op=op) for op in (False, True))
llama_31_8b, llama_31_8b_op = (_llama("llama-3.1-8b", length=8192, selective_op=op) for op in (False, True))
llama_31_70b = _llama("llama-3.1-70b", length=8192)
