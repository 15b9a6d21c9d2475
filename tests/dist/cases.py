"""Small models that train in milliseconds, their batches, and optimizers; importable by ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, ViTShape

Batch = tuple[Tensor, Tensor]

# Widths that divide by nothing, so that slices cut through parameters.
GPT = GPTShape(num_layers=3, width=18, num_heads=3, vocab_size=31, max_seq=8, vocab_multiple=1)
LLAMA = LlamaShape(
    num_layers=3, width=24, num_heads=4, num_kv_heads=2, ffn_width=37, vocab_size=29, max_seq=8, vocab_multiple=1
)
VIT = ViTShape(num_layers=2, width=18, num_heads=3, image_size=8, patch_size=4, num_channels=1, num_classes=7)
RESNET = ResNetShape(
    block="basic", num_blocks=(1, 1, 1, 1), width=3, image_size=8, num_channels=1, num_classes=5, small_images=True
)


def make_tokens(shape: Any) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(shape.vocab_size, (2, shape.max_seq + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return build_model(shape), batch


def make_images(shape: Any) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        images = torch.randn(3, shape.num_channels, shape.image_size, shape.image_size, generator=generator)
        return images, torch.randint(shape.num_classes, (3,), generator=generator)

    return build_model(shape), batch


MODELS = {
    "gpt": partial(make_tokens, GPT),
    "llama": partial(make_tokens, LLAMA),
    "vit": partial(make_images, VIT),
    "resnet": partial(make_images, RESNET),
}
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=1e-1, momentum=0.9)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Awkward(nn.Module):
    """Sizes that divide by nothing, a scalar, an empty parameter, fewer elements than ranks, ties in and across units."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.blocks = nn.ModuleList(AwkwardBlock() for _ in range(3))
        self.blocks[2].outer.weight = self.blocks[0].outer.weight
        self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.scale) + self.empty.sum()


class AwkwardBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 13)
        self.again = self.inner
        self.outer = nn.Linear(13, 7)
        self.single = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) + self.again(x))) * self.single


def make_awkward() -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(5, 7, generator=generator), torch.randn(5, 1, generator=generator)

    return Awkward(), batch


def by_weight_decay(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS = {
    "sgd": sgd,
    "sgd plain": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "adam foreach": partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "adamw plain": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "groups": by_weight_decay,
}
