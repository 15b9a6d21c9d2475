"""A captured step is the ordinary step: the same losses, launched by two calls; `capture = "on"`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan.placement import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = GPTShape(num_layers=3, width=128, num_heads=4, vocab_size=257, max_seq=64)
NUM_STEPS = 8


def batch_of(step: int, *, size: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SHAPE.vocab_size, (size, 65), generator=torch.Generator().manual_seed(step)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def started(plan: Plan, *, model: nn.Module | None = None) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    """A model, its optimizer and a step; captured where the plan says so, and else as near to that as can be."""
    torch.manual_seed(0)
    model = (model or build_model(SHAPE, device="cpu")).cuda()
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    shardwise.prepare(model, optimizer, plan)

    def step(*batch: Tensor) -> Tensor:
        loss = cross_entropy(model, batch)
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, shardwise.capture(step, model, optimizer)


def losses(plan: Plan, *, sizes: list[int] | None = None, rates: list[float] | None = None) -> list[float]:
    model, optimizer, step = started(plan)
    found = []
    for number in range(NUM_STEPS):
        if rates is not None:
            optimizer.param_groups[0]["lr"].fill_(rates[number])
        found.append(step(*batch_of(number, size=sizes[number] if sizes else 4)).item())
    found += [tensor.double().sum().item() for tensor in shardwise.full_state_dict(model)["model"].values()]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_and_weights_are_those_of_ordinary_steps(strategy: str, precision: str) -> None:
    plan = Plan(strategy=strategy, precision=precision, capture="off")
    captured = Plan(strategy=strategy, precision=precision, capture=True)
    assert losses(captured) == pytest.approx(losses(plan), rel=2e-5 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_with_recomputation_too(recompute: str) -> None:
    plan = Plan(recompute=recompute, precision="bf16", capture="off")
    assert losses(Plan(recompute=recompute, precision="bf16", capture=True)) == pytest.approx(losses(plan), rel=1e-3)


def test_the_learning_rate_follows_its_schedule() -> None:
    rates = [1e-3 * 0.5**number for number in range(NUM_STEPS)]
    assert losses(Plan(capture=True), rates=rates) == pytest.approx(losses(Plan(capture="off"), rates=rates), rel=2e-5)
    assert losses(Plan(capture=True), rates=rates) != pytest.approx(losses(Plan(capture=True)), rel=2e-5)


def test_a_batch_of_another_size_runs_as_an_ordinary_step() -> None:
    sizes = [4, 4, 4, 4, 4, 2, 4, 3]
    assert losses(Plan(capture=True), sizes=sizes) == pytest.approx(losses(Plan(capture="off"), sizes=sizes), rel=2e-5)


def test_a_loaded_state_is_what_goes_on() -> None:
    model, optimizer, step = started(Plan(capture=True))
    for number in range(5):
        step(*batch_of(number))
    kept = shardwise.full_state_dict(model, optimizer)
    first = [step(*batch_of(number)).item() for number in range(5, 8)]
    shardwise.load_full_state_dict(model, optimizer, kept)
    assert [step(*batch_of(number)).item() for number in range(5, 8)] == pytest.approx(first, rel=2e-5)


def test_evaluation_between_replays_sees_the_new_weights() -> None:
    model, _, step = started(Plan(capture=True))
    seen = []
    for number in range(7):
        step(*batch_of(number))
        with torch.no_grad():
            seen.append(cross_entropy(model, batch_of(99)).item())
    assert len(set(seen)) == len(seen)
    plain_model, _, plain = started(Plan(capture="off"))
    for number in range(7):
        plain(*batch_of(number))
    with torch.no_grad():
        assert seen[-1] == pytest.approx(cross_entropy(plain_model, batch_of(99)).item(), rel=2e-5)


def test_dropout_draws_anew_in_every_replay() -> None:
    model, optimizer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).cuda(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    shardwise.prepare(model, optimizer, Plan(capture=True))

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = shardwise.capture(step, model, optimizer)
    batch = torch.randn(8, 64, device="cuda")
    found = [step(batch).item() for _ in range(8)]
    assert len(set(found)) == 8


def test_what_cannot_be_captured_says_so_in_a_line() -> None:
    model = nn.Linear(8, 8).cuda()
    with pytest.raises(InvalidPlan, match="SGD has no option capturable"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, sgd, Plan(capture=True))
        shardwise.capture(lambda: None, model, sgd)
    looking, optimizer, _ = started(Plan(capture=True))

    def step(*batch: Tensor) -> Tensor:
        loss = cross_entropy(looking, batch)
        loss.backward()
        assert loss.item() > 0
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = shardwise.capture(step, looking, optimizer)
    with pytest.raises(InvalidModel, match="the step cannot be captured"):
        for number in range(5):
            step(*batch_of(number))
    # The process goes on, with random numbers too.
    assert torch.randn(4, device="cuda").isfinite().all()
