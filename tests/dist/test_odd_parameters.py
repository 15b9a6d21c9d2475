"""Parameters of odd shapes, dtypes and memory: trained as in one process, or refused on all ranks; errors of one rank."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.base.errors import ShardwiseError

WIDTH = 4


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


ODD: dict[str, Callable[[], tuple[nn.Parameter, ...]]] = {
    "no element": lambda: (nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3, 0, 2))),
    "no dimension": lambda: (nn.Parameter(torch.tensor(0.5)), frozen(torch.tensor(3))),
    "transposed": lambda: (nn.Parameter(torch.arange(12.0).reshape(3, 4).t()),),
    "complex": lambda: (nn.Parameter(torch.ones(3, dtype=torch.complex64)),),
    "dtypes that Gloo cannot send": lambda: (frozen(torch.arange(5, dtype=torch.int16)), frozen(torch.ones(3).bool())),
}
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Parameter, ...]], str]] = {
    "expanded": (lambda: (nn.Parameter(torch.ones(1, 4).expand(3, 4)),), "elements of odd.0 share memory"),
    "overlapping": (
        lambda: (lambda one: (nn.Parameter(one[:3]), nn.Parameter(one[2:])))(torch.arange(6.0)),
        "odd.0 and odd.1 share memory without being one parameter",
    ),
    "sparse": (lambda: (nn.Parameter(torch.eye(3).to_sparse()),), "odd.0 is sparse_coo"),
    "lazy": (lambda: (nn.UninitializedParameter(),), "odd.0 has no shape yet"),
}


class Odd(nn.Module):
    def __init__(self, parameters: tuple[nn.Parameter, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for parameter in self.odd:
            x = x + (parameter.real if parameter.is_complex() else parameter).sum() * 0.1
        return x


def made(parameters: tuple[nn.Parameter, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Odd(parameters)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def loss_of(model: nn.Module, *, step: int, rank: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def trains(rank: int, strategy: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, make in ODD.items():
        model, optimizer = made(make())
        shardwise.prepare(model, optimizer, Plan(strategy=strategy), watch_seconds=0.0)
        for step in range(2):
            loss_of(model, step=step, rank=rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_odd_parameters_train_as_in_one_process(strategy: str) -> None:
    found, _ = run_ranks(trains, num_ranks=2, args=(strategy,), timeout_seconds=30)
    for name, make in ODD.items():
        model, optimizer = made(make())
        for step in range(2):
            for rank in range(2):
                (loss_of(model, step=step, rank=rank) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[name][key], value, msg=lambda said, name=name: f"{name}: {said}")


def is_refused(rank: int) -> dict[str, str]:
    said = {}
    for name, (make, _) in REFUSED.items():
        torch.manual_seed(0)
        model = Odd(make())
        with pytest.raises(ShardwiseError) as error:
            shardwise.prepare(model, None, Plan(strategy="fsdp"), watch_seconds=0.0)
        said[name] = str(error.value)
    return said


@pytest.mark.timeout(60)
def test_parameters_that_cannot_have_a_place_of_their_own_are_refused_on_all_ranks() -> None:
    for said in run_ranks(is_refused, num_ranks=2, timeout_seconds=30):
        for name, (_, line) in REFUSED.items():
            assert line in said[name]


PARTS = [
    "shardwise.engine.prepare.check_model",
    "shardwise.engine.prepare.take_apart",
    "shardwise.engine.core.assembly.make_units",
    "shardwise.engine.engine.wrap_units",
]


def raises_alone(rank: int, part: str) -> str:
    """Return what a rank says where rank 1 alone raises in a part of prepare."""
    model, optimizer = made(())
    broken = patch(part, side_effect=IndexError("list index out of range")) if rank == 1 else nullcontext()
    with broken, pytest.raises((ShardwiseError, IndexError)) as error:
        shardwise.prepare(model, optimizer, Plan(strategy="fsdp"), watch_seconds=0.0)
    return str(error.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", PARTS)
def test_an_error_of_one_rank_in_prepare_ends_all_ranks_with_its_line(part: str) -> None:
    waiting, failing = run_ranks(raises_alone, num_ranks=2, args=(part,), timeout_seconds=20)
    assert failing == "list index out of range"
    assert waiting == "rank 1 could not continue: IndexError: list index out of range"
