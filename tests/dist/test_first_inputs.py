"""Ranks that are given the same batch are told so once; ranks that are not, are not."""

import warnings
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from reliability.said import say
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.engine.guards.first_inputs import digest
from shardwise.engines import prepare
from shardwise.plan import Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, *, mask: Tensor | None = None) -> Tensor:
        if batch is None:
            batch = [torch.ones(2, 4)]
        out = self.linear(batch[0] if isinstance(batch, list) else batch)
        return (out if mask is None else out * mask).sum()


def warned(rank: int, given: str, strategy: str = "fsdp", dynamic: bool = False) -> list[str]:
    """The lines told in three steps, and whether a hook is left."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, Plan(strategy=strategy, dynamic=dynamic))
    own, same = (torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (rank, 7))
    batches: dict[str, Any] = {
        "the same": same,
        "the same in a list": [same],
        "its own": own,
        "of two ranks": same if rank < 2 else own,
        "zeros": torch.zeros(2, 4),
        "no tensor": None,
        # A try without a backward, then training.
        "its own after a try": own,
        # Long after the first step.
        "the same later": own,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if given == "its own after a try":
            model(same)
        for step in range(3):
            batch = same if given == "the same later" and step else batches[given]
            model(batch, mask=torch.ones(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(item.message) for item in caught if "same batch" in str(item.message)]


@pytest.mark.ledger("same-data", outcome="warned")
@pytest.mark.parametrize("given", ["the same", "the same in a list"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rank_0_tells_once_that_all_ranks_have_the_same_batch(given: str, strategy: str, dynamic: bool) -> None:
    told, quiet = run_ranks(warned, num_ranks=2, args=(given, strategy, dynamic))
    assert quiet == []
    assert len(told) == 1
    assert say(told[0]).startswith("all 2 ranks were given the same batch in the first step")
    assert "DistributedSampler" in told[0]
    assert "\n" not in told[0]


def test_two_ranks_of_three_that_share_a_batch_are_named() -> None:
    """As a sampler makes them that was told a wrong number of ranks."""
    told, *others = run_ranks(warned, num_ranks=3, args=("of two ranks",))
    assert others == [[], []]
    assert len(told) == 1
    assert told[0].startswith("ranks 0, 1 were given the same batch in the first step")


@pytest.mark.parametrize("given", ["its own", "zeros", "no tensor", "its own after a try", "the same later"])
def test_nothing_is_told_where_batches_differ_or_say_nothing(given: str) -> None:
    assert run_ranks(warned, num_ranks=2, args=(given,)) == [[], []]


def test_one_rank_alone_is_told_nothing() -> None:
    assert run_ranks(warned, num_ranks=1, args=("the same",)) == [[]]


def test_the_first_step_ends_the_look() -> None:
    assert run_ranks(hooks_left, num_ranks=2) == [True, True]


def hooks_left(rank: int) -> bool:
    model = Net()
    prepare(model, None, Plan(strategy="fsdp", precision="native"))
    before = len(model._forward_pre_hooks)
    model(torch.randn(2, 4)).backward()
    return len(model._forward_pre_hooks) == before - 1


def test_a_rehearsal_is_told_nothing() -> None:
    model = Net()
    with absent_group(4), warnings.catch_warnings(action="error"):
        prepare(model, None, Plan(strategy="fsdp"), collectives=AbsentCollectives())
        model(torch.randn(2, 4)).backward()


def test_a_digest_is_of_any_tensors_and_none_where_there_is_nothing_to_tell() -> None:
    batch = {"x": torch.randn(3, 5, dtype=torch.bfloat16).t(), "more": [torch.arange(1 << 17), "text", None, True]}
    assert digest(batch) == digest({"x": batch["x"].clone(), "more": [torch.arange(1 << 17)]})
    assert digest(batch) != digest({"x": batch["x"] + 1, "more": batch["more"]})
    for nothing in ((), {"a": 1}, torch.ones(4), torch.empty(0), torch.tensor(3), torch.randn(4, device="meta")):
        assert digest(nothing) is None
