"""How a plain model is cut: large layers are gathered one by one, and one large unit is told."""

import warnings

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import shardwise
from shardwise.plan import Plan

WIDTH = 512


class Named(nn.Module):
    """Layers as attributes: nothing says that each is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(batch))))


def sequential() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def trained(rank: int, strategy: str) -> tuple[list[str], list[Tensor]]:
    """The gathers of a step by name, and the weights after two."""
    torch.manual_seed(0)
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    for step in range(2):
        with shardwise.tape(model) as tape:
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            issued = [str(operation) for operation in tape.take()]
    return [line for line in issued if line.startswith("gather ")], list(
        shardwise.full_state_dict(model)["model"].values()
    )


def test_a_plain_sequential_is_gathered_layer_by_layer_and_trains_as_under_ddp() -> None:
    for (gathers, sharded), (none, whole) in zip(
        run_ranks(trained, num_ranks=2, args=("fsdp",)), run_ranks(trained, num_ranks=2, args=("ddp",)), strict=True
    ):
        assert none == []
        assert {f"gather {layer}" for layer in (0, 2, 4)} <= set(gathers)
        assert all(torch.equal(one, other) for one, other in zip(sharded, whole, strict=True))


def told(rank: int, kind: str, strategy: str, units: str, engine: str = "shardwise") -> list[str]:
    model = Named() if kind == "named" else sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, units=units, engine=engine))
    return [str(item.message) for item in caught if "in one unit" in str(item.message)]


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_rank_0_tells_that_one_unit_holds_most_of_the_model_and_what_cuts_it(engine: str) -> None:
    lines, quiet = run_ranks(told, num_ranks=2, args=("named", "fsdp", "auto", engine))
    assert quiet == []
    assert len(lines) == 1
    assert lines[0].startswith(
        "units = 'auto' leaves 100% of Named's parameters in one unit, (root), which is gathered"
    )
    way_out = lines[0].partition("units = 'min-params:")[2].partition("'")[0]
    assert run_ranks(told, num_ranks=2, args=("named", "fsdp", f"min-params:{way_out}", engine)) == [[], []]


@pytest.mark.parametrize(
    ("kind", "strategy", "units"),
    [("named", "ddp", "auto"), ("named", "zero2", "auto"), ("named", "fsdp", "none"), ("sequential", "fsdp", "auto")],
)
def test_nothing_is_told_where_params_are_whole_or_cut_or_it_was_asked_for(
    kind: str, strategy: str, units: str
) -> None:
    assert run_ranks(told, num_ranks=2, args=(kind, strategy, units)) == [[], []]


def test_one_rank_is_told_nothing() -> None:
    assert run_ranks(told, num_ranks=1, args=("named", "fsdp", "auto")) == [[]]
