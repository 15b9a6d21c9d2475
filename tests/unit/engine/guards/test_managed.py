"""When a prepared model is walked through for parameters that were added to it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Plan, prepare
from shardwise.base.errors import InvalidModel
from shardwise.comm.job.absent import AbsentCollectives, absent_group


class Sliced(nn.Module):
    """Loops over a slice of its layers, as transformers' models do: each slice is a new ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.num_walks = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        return x

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.num_walks += 1
        return super().named_parameters(*arguments, **options)


@pytest.fixture
def model() -> Iterator[Sliced]:
    """Prepared, and two steps on."""
    with absent_group(1):
        model = Sliced()
        plan = Plan(strategy="ddp", units="class:Linear")
        prepare(model, None, plan, collectives=AbsentCollectives(), compare_every=0)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        yield model


def test_a_forward_that_slices_its_layers_does_not_walk_through_the_model(model: Sliced) -> None:
    model.num_walks = 0
    model(torch.ones(2, 4)).sum().backward()
    assert model.num_walks == 0


def test_a_module_of_another_model_is_new_to_this_one_also_if_it_was_made_long_before(model: Sliced) -> None:
    other = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    model.layers.append(other)
    with pytest.raises(InvalidModel, match=r"layers\.3\.weight \(4, 4\) was added"):
        model(torch.ones(2, 4))


def test_a_new_module_that_is_inserted_past_torchs_own_registration_is_noticed(model: Sliced) -> None:
    model.layers.insert(0, nn.Linear(4, 4))
    with pytest.raises(InvalidModel, match="was added"):
        model(torch.ones(2, 4))
