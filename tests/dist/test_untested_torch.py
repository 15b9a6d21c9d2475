"""`shardwise.prepare` names a torch that was not tested: on rank 0, once, and then it trains."""

import warnings
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import nn

import shardwise
from shardwise.base.vocabulary import tested_versions
from shardwise.plan import Plan


def warned(rank: int, found: str, engine: str) -> list[str]:
    tested_versions.warn_if_untested_torch.cache_clear()
    lines: list[str] = []
    with (
        patch.object(tested_versions, "version", lambda package: found),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = shardwise.prepare(model, optimizer, Plan(strategy="ddp", engine=engine))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    tested_versions.warn_if_untested_torch.cache_clear()
    lines += [str(item.message) for item in caught if "torch" in str(item.message)]
    return lines


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_rank_0_warns_once_of_a_torch_that_was_not_tested_and_trains(engine: str) -> None:
    expected = tested_versions.untested_torch("9.1.0")
    assert run_ranks(warned, num_ranks=2, args=("9.1.0", engine)) == [[expected], []]


def test_a_tested_torch_is_not_named() -> None:
    assert run_ranks(warned, num_ranks=2, args=(tested_versions.TESTED_TORCH[0], "shardwise")) == [[], []]
