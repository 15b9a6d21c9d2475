"""Ranks that hold different amounts of data, and ranks that run out of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import MODELS, adamw, sgd
from ranks import run_ranks
from torch import Tensor, nn
from training import make_collectives
from whole import in_turn, strategies, whole

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

NUM_RANKS = 3


def tokens_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """More samples on higher ranks, and some tokens that do not count."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(31, (1 + rank, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, : 2 * rank] = -100
    return tokens[:, :-1], targets


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def count(batch: tuple[Tensor, Tensor]) -> int:
    return int((batch[1] != -100).sum())


def per_token(rank: int, strategy: str, passes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    model = model.double()
    plan = Plan(strategy=strategy, precision="native")
    collectives = make_collectives(late=True, rank=rank)
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), plan, collectives=collectives)
    for step in range(2):
        batches = [tokens_of(rank, passes * step + number) for number in range(passes)]
        mean = shardwise.mean_count(model, sum(map(count, batches)))
        for number, batch in enumerate(batches):
            with shardwise.accumulate(model, enabled=number + 1 < passes):
                (summed_loss(model, batch) / mean).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def per_token_in_one_process(rank: int, passes: int) -> dict[str, Tensor]:
    """The mean over all tokens of all ranks and passes."""
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    model = model.double()
    optimizer = sgd(model.parameters())
    for step in range(2):
        batches = [tokens_of(r, passes * step + number) for r in range(NUM_RANKS) for number in range(passes)]
        total = sum(map(count, batches))
        for batch in batches:
            (summed_loss(model, batch) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
@pytest.mark.parametrize("passes", [2, *whole(1)])
def test_a_loss_per_token_is_the_mean_over_all_ranks_tokens(strategy: str, passes: int) -> None:
    (expected,) = run_ranks(per_token_in_one_process, num_ranks=1, args=(passes,))
    for weights in run_ranks(per_token, num_ranks=NUM_RANKS, args=(strategy, passes)):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-12, rtol=1e-10)


def summed(rank: int, strategy: str) -> None:
    """Without weights: the mean over ranks of what each rank's loss is, be it a sum or a mean."""
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    twin, _ = MODELS["gpt"]()
    twin.load_state_dict(model.state_dict())
    shardwise.prepare(model, None, Plan(strategy=strategy))
    summed_loss(model, tokens_of(rank, 0)).backward()
    norm = shardwise.clip_grad_norm_(model, 1e9)
    total = sum(summed_loss(twin, tokens_of(r, 0)) for r in range(NUM_RANKS)) / NUM_RANKS
    total.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_a_summed_loss_is_averaged_over_ranks_as_it_is(strategy: str) -> None:
    run_ranks(summed, num_ranks=NUM_RANKS, args=(strategy,))


# Join

LENGTHS = (2, 4, 0)


def batches_of(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (tokens_of(rank, step) for step in range(LENGTHS[rank]))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return summed_loss(model, batch) / count(batch)


def joined(rank: int, strategy: str, weighted: bool) -> tuple[int, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    model = model.double()
    plan = Plan(strategy=strategy, precision="native")
    collectives = make_collectives(late=True, rank=rank)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan, collectives=collectives)
    num_steps = 0
    for batch in shardwise.join(model, batches_of(rank)):
        if weighted:
            loss = summed_loss(model, batch) / shardwise.mean_count(model, count(batch))
        else:
            loss = mean_loss(model, batch)
        loss.backward()
        shardwise.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    return num_steps, dict(model.state_dict())


def joined_in_one_process(rank: int, weighted: bool) -> tuple[int, dict[str, Tensor]]:
    """In each step the ranks that have a batch."""
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    model = model.double()
    optimizer = adamw(model.parameters())
    num_steps = max(LENGTHS)
    for step in range(num_steps):
        batches = [tokens_of(r, step) for r, length in enumerate(LENGTHS) if step < length]
        for batch in batches:
            if weighted:
                (summed_loss(model, batch) / sum(map(count, batches))).backward()
            else:
                (mean_loss(model, batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return num_steps, dict(model.state_dict())


@pytest.mark.parametrize(("weighted", "strategy"), in_turn([False, True], "zero1", "fsdp"))
def test_ranks_that_run_out_of_batches_go_on_without_counting(strategy: str, weighted: bool) -> None:
    ((num_steps, expected),) = run_ranks(joined_in_one_process, num_ranks=1, args=(weighted,))
    for steps, weights in run_ranks(joined, num_ranks=NUM_RANKS, args=(strategy, weighted)):
        assert steps == num_steps
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-9, rtol=1e-8)


def not_even_nan(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    for step, batch in enumerate(shardwise.join(model, batches_of(rank))):
        loss = summed_loss(model, batch)
        if step >= LENGTHS[rank]:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_what_a_rank_without_batches_computes_does_not_count_be_it_nan(strategy: str) -> None:
    run_ranks(not_even_nan, num_ranks=NUM_RANKS, args=(strategy,))


def statistics(rank: int) -> dict[str, Tensor]:
    """BatchNorm: rank 0 has one batch, rank 1 three. The statistics end as rank 1's."""
    torch.manual_seed(0)
    model, batch = MODELS["resnet"]()
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), Plan(strategy="fsdp"))
    seen: list[dict[str, Tensor]] = []
    for _ in shardwise.join(model, range(1 + 2 * rank)):
        cross_entropy(model, batch(len(seen), rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.clone() for name, value in model.named_buffers()})
    after = dict(model.named_buffers())
    if rank == 1:
        assert all(torch.equal(after[name], value) for name, value in seen[-1].items())
    return {name: value.clone() for name, value in after.items()}


def test_batch_statistics_come_from_a_rank_that_has_data() -> None:
    one, other = run_ranks(statistics, num_ranks=2)
    assert all(torch.equal(one[name], value) for name, value in other.items())


def mistakes(rank: int) -> None:
    model, _ = MODELS["gpt"]()
    shardwise.prepare(model, None, Plan())
    with pytest.raises(ShardwiseError, match="nothing to take the mean of"):
        shardwise.mean_count(model, 0)
    loop: Any = shardwise.join(model, [1])
    next(loop)
    with pytest.raises(ShardwiseError, match="inside shardwise.join"):
        next(shardwise.join(model, [1]))
    assert list(loop) == []
    assert list(shardwise.join(model, [1, 2])) == [1, 2]
    assert list(shardwise.join(model, [])) == []


def test_counts_and_joins_that_make_no_sense_are_refused() -> None:
    run_ranks(mistakes, num_ranks=2)
