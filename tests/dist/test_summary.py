"""`shardwise.summary`: what prepare decided, and how much a rank owns."""

import pytest
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

import shardwise
from shardwise import Mesh, Plan


def summarised(rank: int, plan: Plan) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = shardwise.prepare(model, SGD(model.parameters(), lr=0.1), plan)
    return shardwise.summary(model)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(strategy="ddp"), "ddp on 2 ranks, fp32, engine shardwise; rank {} owns 144 of 144 parameters"),
        (Plan(strategy="fsdp"), "fsdp on 2 ranks, fp32, engine shardwise; rank {} owns 72 of 144 parameters"),
        (
            Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=1)),
            "fsdp on 2 ranks as 2×1, fp32, engine shardwise; rank {} owns 144 of 144 parameters",
        ),
        (
            Plan(strategy="ddp", engine="torch"),
            "ddp on 2 ranks, fp32, engine torch; rank {} owns 144 of 144 parameters",
        ),
    ],
)
def test_the_summary_names_strategy_ranks_and_share(plan: Plan, expected: str) -> None:
    assert run_ranks(summarised, num_ranks=2, args=(plan,)) == [expected.format(0), expected.format(1)]
