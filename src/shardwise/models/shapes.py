"""The dimensions of the catalogue's models, and formulas for their numbers of parameters. No torch here.

A shape has everything that its module needs; `dataclasses.replace` makes a variant of it.

`num_params` is the published number. Language models hold a few more: their embedding and head are padded to
`vocab_rows`, a multiple of `vocab_multiple`, because matrix products are slow if a dimension is not a multiple of 8,
and fastest at multiples of 128. The padding rows are 0 and stay 0 (layers.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


def rounded_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """GPT-2's architecture: learned positions, biases everywhere, the head tied to the embedding.

    num_params = L·(12d² + 13d) + 2d + (V + S)·d
    (a block: 4d² + 4d attention, 8d² + 5d feed-forward, 4d for its two norms).
    """

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = 50257
    max_seq: int = 1024
    dropout: float = 0.0
    vocab_multiple: int = 128

    @property
    def num_params(self) -> int:
        in_block = 12 * self.width**2 + 13 * self.width
        return self.num_layers * in_block + (2 + self.vocab_size + self.max_seq) * self.width

    @property
    def vocab_rows(self) -> int:
        return rounded_up(self.vocab_size, self.vocab_multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The factors by which Llama 3.1 stretches rotary wavelengths, for contexts longer than in its first training."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Llama's architecture: RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases.

    num_params = L·(2d² + 2d·k + 3d·f + 2d) + d + V·d·(1 if tied else 2)
    with k = the keys' width = num_kv_heads · d / num_heads, and f = ffn_width.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int
    max_seq: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    vocab_multiple: int = 128

    @property
    def num_params(self) -> int:
        d, kv_width = self.width, self.num_kv_heads * self.width // self.num_heads
        in_block = 2 * d * d + 2 * d * kv_width + 3 * d * self.ffn_width + 2 * d
        return self.num_layers * in_block + d * (1 + self.vocab_size * (1 if self.tied else 2))

    @property
    def vocab_rows(self) -> int:
        return rounded_up(self.vocab_size, self.vocab_multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTShape:
    """The Vision Transformer: patches, a class token, learned positions, pre-norm blocks, a linear head.

    num_params = L·(12d² + 13d) + 2d + (c·p² + 1)·d + d + (n + 1)·d + (d + 1)·classes
    with c channels and n patches of p × p pixels.
    """

    num_layers: int
    width: int
    num_heads: int
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    dropout: float = 0.0

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_params(self) -> int:
        d, patch = self.width, self.num_channels * self.patch_size**2
        embedding = (patch + 1) * d + d + (self.num_patches + 1) * d
        return self.num_layers * (12 * d**2 + 13 * d) + 2 * d + embedding + (d + 1) * self.num_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """ResNet v1.5: four stages of basic blocks (two 3×3) or bottlenecks (1×1, 3×3, 1×1, four times as wide).

    A convolution has no bias, and is followed by a norm with two parameters per channel. `small_images` replaces the
    7×7 stem of stride 2 and its pooling by one 3×3 convolution.
    """

    block: Literal["basic", "bottleneck"]
    num_blocks: tuple[int, int, int, int]
    width: int = 64
    image_size: int = 224
    num_channels: int = 3
    num_classes: int = 1000
    small_images: bool = False

    @property
    def expansion(self) -> int:
        return 1 if self.block == "basic" else 4

    @property
    def num_params(self) -> int:
        # Convolutions as (inputs, outputs, kernel size).
        convolutions = [(self.num_channels, self.width, 3 if self.small_images else 7)]
        inputs = self.width
        for stage, depth in enumerate(self.num_blocks):
            inner = self.width * 2**stage
            outputs = inner * self.expansion
            for _ in range(depth):
                if self.block == "bottleneck":
                    convolutions += [(inputs, inner, 1), (inner, inner, 3), (inner, outputs, 1)]
                else:
                    convolutions += [(inputs, inner, 3), (inner, inner, 3)]
                # The shortcut is a 1×1 convolution if the block's input differs from its output.
                if inputs != outputs:
                    convolutions.append((inputs, outputs, 1))
                inputs = outputs
        with_norms = sum(before * after * kernel**2 + 2 * after for before, after, kernel in convolutions)
        return with_norms + (inputs + 1) * self.num_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersShape:
    """A language model of the transformers library: its type and the values of its config.json.

    num_params is stated, and tested against the module. max_seq: tokens per sample, unless others are asked for.
    """

    model_type: str
    num_params: int
    max_seq: int
    config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])


Shape = GPTShape | LlamaShape | TransformersShape | ViTShape | ResNetShape
TokenShape = GPTShape | LlamaShape | TransformersShape
"""Models that read tokens."""
