"""The dimensions of the catalogue's models, and their parameter counts by formula. No torch here.

A shape says everything that its module needs; `dataclasses.replace` makes a variant of one.

num_params is what is published. Language models hold a little more, `num_held`: the rows of their embedding and head
are rounded up to a multiple of `vocab_multiple`, because matrix products are slow where a dimension is not a multiple
of 8, and fastest at multiples of 128. The rows past the vocabulary are 0 and stay 0 (layers.py).
"""

from dataclasses import dataclass
from typing import Literal


def rounded_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not below `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """GPT-2's architecture: learned positions, biases everywhere, the head tied to the embedding.

    num_params = 12·L·d² + 13·L·d + 2·d + (V + S)·d
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
        layers, d = self.num_layers, self.width
        return 12 * layers * d * d + 13 * layers * d + 2 * d + (self.vocab_size + self.max_seq) * d

    @property
    def vocab_rows(self) -> int:
        return rounded_up(self.vocab_size, self.vocab_multiple)

    @property
    def num_held(self) -> int:
        return self.num_params + (self.vocab_rows - self.vocab_size) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary wavelengths to contexts longer than it was first trained on."""

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
        block = 2 * d * d + 2 * d * kv_width + 3 * d * self.ffn_width + 2 * d
        return self.num_layers * block + d + self.vocab_size * d * (1 if self.tied else 2)

    @property
    def vocab_rows(self) -> int:
        return rounded_up(self.vocab_size, self.vocab_multiple)

    @property
    def num_held(self) -> int:
        return self.num_params + (self.vocab_rows - self.vocab_size) * self.width * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTShape:
    """The Vision Transformer: patches, a class token, learned positions, pre-norm blocks, a linear head.

    num_params = 12·L·d² + 13·L·d + 2·d + (c·p² + 1)·d + d + (n + 1)·d + (d + 1)·classes
    with c channels, patches of p × p, and n of them.
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
        layers, d = self.num_layers, self.width
        blocks = 12 * layers * d * d + 13 * layers * d + 2 * d
        patches = (self.num_channels * self.patch_size**2 + 1) * d
        tokens = d + (self.num_patches + 1) * d
        return blocks + patches + tokens + (d + 1) * self.num_classes

    @property
    def num_held(self) -> int:
        return self.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """ResNet v1.5: four stages of basic blocks (two 3×3) or bottlenecks (1×1, 3×3, 1×1, four times as wide).

    `small_images` replaces the 7×7 stem of stride 2 and its pooling by one 3×3 convolution.
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
        """Convolutions have no bias; each is followed by a norm with two parameters a channel."""

        def conv_and_norm(inputs: int, outputs: int, kernel: int) -> int:
            return inputs * outputs * kernel**2 + 2 * outputs

        total = conv_and_norm(self.num_channels, self.width, 3 if self.small_images else 7)
        inputs = self.width
        for stage, depth in enumerate(self.num_blocks):
            inner = self.width * 2**stage
            outputs = inner * self.expansion
            for index in range(depth):
                if self.block == "basic":
                    total += conv_and_norm(inputs, inner, 3) + conv_and_norm(inner, inner, 3)
                else:
                    total += conv_and_norm(inputs, inner, 1) + conv_and_norm(inner, inner, 3)
                    total += conv_and_norm(inner, outputs, 1)
                # The first block of a stage adds a 1×1 shortcut where its input differs from its output.
                if index == 0 and inputs != outputs:
                    total += conv_and_norm(inputs, outputs, 1)
                inputs = outputs
        return total + (inputs + 1) * self.num_classes

    @property
    def num_held(self) -> int:
        return self.num_params


Shape = GPTShape | LlamaShape | ViTShape | ResNetShape
