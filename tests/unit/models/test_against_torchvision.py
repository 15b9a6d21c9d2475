"""ResNet computes what torchvision's computes, with its weights loaded by their own names."""

import pytest
import torch

from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model

torchvision = pytest.importorskip("torchvision")


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnet_computes_what_torchvisions_computes(name: str) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name, weights=None)
    ours = build_model(shape_of(name))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))
