"""Shape → module."""

import torch
from torch import nn

from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama
from shardwise.models.resnet import ResNet
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, Shape, ViTShape
from shardwise.models.vit import ViT
from shardwise.units.materialize import materialize


def build_model(shape: Shape, *, device: torch.device | str = "cpu") -> nn.Module:
    """The module of a shape.

    It is always described on the meta device first, where it costs nothing, and filled from there:
    so a seed gives the same weights whether a model is filled whole, later, or unit by unit.
    """
    with torch.device("meta"):
        model = _module(shape)
    if torch.device(device).type != "meta":
        materialize(model, device=device)
    return model


def _module(shape: Shape) -> nn.Module:
    match shape:
        case GPTShape():
            return GPT(shape)
        case LlamaShape():
            return Llama(shape)
        case ViTShape():
            return ViT(shape)
        case ResNetShape():
            return ResNet(shape)
