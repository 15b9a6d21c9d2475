"""Evaluation in which ranks run the model different numbers of times: they agree, or the one that is missing is named."""

from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from test_asked_by_others import make_llama
from torch import Tensor
from training import line, make_collectives
from whole import whole

import shardwise
from shardwise.comm.groups.agreement import RanksMissing
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

NUM_BATCHES = (1, 4)
PLANS = {
    "zero2": Plan(strategy="zero2"),
    "fsdp": Plan(strategy="fsdp"),
    "two groups": Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=1)),
}


def steps(model: Any, optimizer: Any, batch: Any, *, rank: int, first: int, num_steps: int = 2) -> None:
    for step in range(first, first + num_steps):
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluates(rank: int, name: str) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """(what was computed inside the block, what a whole model computes, the weights after more steps)."""
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    collectives = make_collectives(late=True, rank=rank)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), PLANS[name], collectives=collectives)
    seen, expected = [], []
    for first in (0, 2):
        plain, _ = MODELS["gpt"]()
        plain.load_state_dict(model.state_dict())
        with shardwise.evaluating(model), torch.no_grad():
            for number in range(NUM_BATCHES[rank]):
                seen.append(model(batch(50 + number, rank)[0]))
        with torch.no_grad():
            expected += [plain(batch(50 + number, rank)[0]) for number in range(NUM_BATCHES[rank])]
        steps(model, optimizer, batch, rank=rank, first=first)
    return seen, expected, shardwise.full_state_dict(model)["model"]


def trains_only(rank: int, name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), PLANS[name])
    steps(model, optimizer, batch, rank=rank, first=0, num_steps=4)
    return shardwise.full_state_dict(model)["model"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["zero2", "two groups", *whole("fsdp")])
def test_ranks_evaluate_different_numbers_of_batches_and_train_on_as_without(name: str) -> None:
    only, _ = run_ranks(trains_only, num_ranks=2, args=(name,))
    for seen, expected, weights in run_ranks(evaluates, num_ranks=2, args=(name,)):
        assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
        assert all(torch.equal(weights[key], value) for key, value in only.items())


def generates(rank: int, strategy: str) -> list[list[int]]:
    """Rank 0 has one sentence to write, rank 1 three, of other lengths."""
    model = make_llama()
    asked = {0: (0,), 1: (1, 2, 3)}
    if strategy == "one process":
        found = [one for ask in asked.values() for one in ask]
        return [generated(model, one) for one in found]
    shardwise.prepare(model, None, Plan(strategy=strategy))
    with shardwise.evaluating(model):
        return [generated(model, one) for one in asked[rank]]


def generated(model: Any, number: int) -> list[int]:
    prompt = torch.tensor([[3 + number, 4, 5]])
    return model.generate(prompt, do_sample=False, max_new_tokens=3 + 2 * number, pad_token_id=0)[0].tolist()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("zero2")])
def test_ranks_generate_different_numbers_of_sentences(strategy: str) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_ranks(generates, num_ranks=1, args=("one process",))
    found = run_ranks(generates, num_ranks=2, args=(strategy,), timeout_seconds=100.0)
    assert [sentence for sentences in found for sentence in sentences] == expected


def without_the_block(rank: int) -> str:
    """Rank 0 evaluates a batch more; rank 1 trains on, and would gather what rank 0 does not."""
    model, batch = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan())
    steps(model, optimizer, batch, rank=rank, first=0)
    with torch.no_grad():
        for number in range(2 - rank):
            model(batch(number, rank)[0])
    said = ""
    if rank == 1:
        engine_of(model).core.evaluation.patience_seconds = 0.5
        with pytest.raises(RanksMissing) as caught:
            model(batch(2, rank)[0])
        said = str(caught.value)
        with torch.no_grad():
            # What rank 0 waits for.
            model(batch(1, rank)[0])
    steps(model, optimizer, batch, rank=rank, first=2)
    return said


@pytest.mark.timeout(60)
def test_a_rank_that_trains_while_another_evaluates_names_it_and_the_way_out() -> None:
    _, said = run_ranks(without_the_block, num_ranks=2)
    assert said.startswith("rank 0 did not come to a step after an evaluation within")
    assert "`with shardwise.evaluating(model):`" in said


def trains_inside(rank: int, strategy: str) -> None:
    model, batch = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    with shardwise.evaluating(model):
        refused = line(lambda: model(batch(0, rank)[0]))
        assert refused.startswith("a forward that trains inside `with shardwise.evaluating(model):`")
        assert line(optimizer.step).startswith("optimizer.step() inside")
    steps(model, optimizer, batch, rank=rank, first=0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_step_inside_the_block_is_refused(strategy: str) -> None:
    run_ranks(trains_inside, num_ranks=2, args=(strategy,))
