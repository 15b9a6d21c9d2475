"""Shape → module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.models.own.gpt import GPT
from shardwise.models.own.llama import Llama
from shardwise.models.own.resnet import ResNet
from shardwise.models.own.vit import ViT
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, Shape, TransformersShape, ViTShape
from shardwise.models.transformers_model import model_of_shape
from shardwise.program.units.materialize import materialize

_MODULES: Mapping[type, Callable[[Any], nn.Module]] = {
    GPTShape: GPT,
    LlamaShape: Llama,
    TransformersShape: model_of_shape,
    ViTShape: ViT,
    ResNetShape: ResNet,
}


def build_model(shape: Shape, *, device: torch.device | str = "cpu") -> nn.Module:
    """Build the module of a shape.

    It is always made on the meta device first, where it costs nothing, and then materialized. So a seed gives the same
    weights whether the model is materialized at once, later, or unit by unit.
    """
    with torch.device("meta"):
        model = _MODULES[type(shape)](shape)
    if torch.device(device).type != "meta":
        materialize(model, device=device)
    return model
