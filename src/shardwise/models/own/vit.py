"""The Vision Transformer."""

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.own.layers import Linear, PreNormBlock, normal
from shardwise.models.shapes import ViTShape


class PatchEmbedding(nn.Module):
    """Images [batch, channels, height, width] → tokens [batch, 1 + patches, width], class token first."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        if shape.image_size % shape.patch_size:
            raise InvalidModel(
                f"an image of {shape.image_size} pixels cannot be cut into patches of {shape.patch_size}"
            )
        self.project = nn.Conv2d(shape.num_channels, shape.width, shape.patch_size, stride=shape.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, shape.width))
        self.positions = nn.Parameter(torch.empty(1, 1 + shape.num_patches, shape.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal(self.class_token, std=0.02)
        normal(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1)
        return tokens + self.positions


class Block(PreNormBlock):
    """One bidirectional transformer block."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__(shape, causal=False, norm_eps=1e-6, out_std=0.02, approximate="none")


class ViT(nn.Module):
    """Images [batch, channels, height, width] → logits [batch, classes]."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = PatchEmbedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, eps=1e-6)
        self.head = Linear(shape.width, shape.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        # Only the class token is classified, so only this token is normalised.
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits
