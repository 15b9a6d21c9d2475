"""`shardwise.step` is the loop that it stands for, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from torch import Tensor

import shardwise
from shardwise import Plan
from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.models.tasks import cross_entropy

NUM_STEPS = 3
# Of a gradient whose norm is larger, so that it is clipped.
MAX_NORM = 0.05


def trained(
    rank: int, plan: Plan, make_step: Callable[[Any, Any], Callable[..., Tensor]], *, passes: int
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    step = make_step(model, optimizer)
    losses = [
        step(*(batch(passes * number + part, rank) for part in range(passes))).item() for number in range(NUM_STEPS)
    ]
    return losses, shardwise.full_state_dict(model)["model"]


def one_call(model: Any, optimizer: Any) -> Callable[..., Tensor]:
    return shardwise.step(model, optimizer, cross_entropy, max_norm=MAX_NORM)


def by_hand(model: Any, optimizer: Any) -> Callable[..., Tensor]:
    def step(*batches: Any) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            with shardwise.accumulate(model, enabled=number + 1 < len(batches)):
                loss = cross_entropy(model, batch) / len(batches)
                loss.backward()
            total += loss.detach()
        assert shardwise.clip_grad_norm_(model, MAX_NORM) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def compared(rank: int, plans: list[Plan]) -> None:
    for plan in plans:
        for passes in (1, 2):
            losses, weights = trained(rank, plan, one_call, passes=passes)
            expected, expected_weights = trained(rank, plan, by_hand, passes=passes)
            assert losses == expected
            assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


def test_a_step_is_the_loop_written_by_hand_on_both_engines_with_and_without_accumulation() -> None:
    run_ranks(compared, num_ranks=2, args=([Plan(), Plan(strategy="ddp", engine="torch")],))


def asked(rank: int) -> None:
    model, batch = MODELS["gpt"]()
    with pytest.raises(InvalidModel, match=r"has not been through shardwise\.prepare"):
        shardwise.step(model, adamw(model.parameters()), cross_entropy)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan())
    step = shardwise.step(model, optimizer, cross_entropy)
    with pytest.raises(InvalidData, match="was given no batch"):
        step()
    loss = step(batch(0, rank))
    assert not loss.requires_grad
    assert step.grad_norm is None
    clipping = shardwise.step(model, optimizer, cross_entropy, max_norm=1.0)
    clipping(batch(1, rank))
    assert clipping.grad_norm is not None
    assert clipping.grad_norm > 0


def test_what_a_step_tells_and_refuses() -> None:
    run_ranks(asked, num_ranks=1)


def scaled(rank: int) -> None:
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(precision="fp16"))
    scaler = shardwise.GradScaler("cpu", init_scale=2.0**40)
    step = shardwise.step(model, optimizer, cross_entropy, max_norm=1.0, scaler=scaler)
    before = shardwise.full_state_dict(model)["model"]
    step(batch(0, rank))
    # Gradients overflowed: the step was skipped, and the scale is lower.
    assert scaler.get_scale() == 2.0**39
    after = shardwise.full_state_dict(model)["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_scaler_skips_the_step_whose_gradients_overflow() -> None:
    run_ranks(scaled, num_ranks=1)
