from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.program.units.materialize import materialize

TINY = ["gpt-tiny", "llama-tiny", "vit-digits", "resnet-digits"]


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_the_same_weights_now_or_later(name: str) -> None:
    torch.manual_seed(7)
    now = build_model(shape_of(name))
    later = build_model(shape_of(name), device="meta")
    torch.manual_seed(7)
    materialize(later)
    for (path, a), (_, b) in zip(now.state_dict().items(), later.state_dict().items(), strict=True):
        assert torch.equal(a, b), path
    for (path, a), (_, b) in zip(now.named_buffers(), later.named_buffers(), strict=True):
        assert torch.equal(a, b), path


@pytest.fixture
def _nan_where_nobody_wrote() -> Iterator[None]:
    """torch.empty gives NaN instead of what happened to lie there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_where_nobody_wrote")
@pytest.mark.parametrize("name", TINY)
def test_every_tensor_is_filled(name: str) -> None:
    assert torch.empty(1).isnan()
    model = build_model(shape_of(name), device="meta")
    materialize(model)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device.type == "cpu", path
        assert torch.isfinite(tensor).all(), path


def test_ties_are_kept() -> None:
    model = build_model(shape_of("gpt-tiny"))
    assert model.head.weight is model.embed.weight


def test_what_is_real_already_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = model[0].weight.clone()
    materialize(model)
    assert torch.equal(model[0].weight, before)
    assert not model[1].weight.is_meta


def test_frozen_stays_frozen_and_dtypes_stay() -> None:
    layer = nn.Linear(2, 2, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    materialize(layer)
    assert not layer.weight.requires_grad
    assert layer.weight.dtype is torch.bfloat16


def test_a_module_that_cannot_fill_itself_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(InvalidModel, match=r"1 \(Bare\) .* has no reset_parameters"):
        materialize(nn.Sequential(nn.ReLU(), Bare()))


class Packed(nn.Parameter):
    """A parameter with an attribute that is needed to read it."""

    scale: float


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.weight = Packed(torch.empty(2, 2, device="meta"), requires_grad=False)
    layer.weight.scale = 3.0
    materialize(layer)
    assert type(layer.weight) is Packed
    assert (layer.weight.scale, layer.weight.is_meta, layer.weight.requires_grad) == (3.0, False, False)
