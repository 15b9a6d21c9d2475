"""Updates inside backward: the same training, without a full set of gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from torch import Tensor, nn
from training import Case, assert_equal, make_collectives, on_ranks, one_process

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

GPT = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)
PLANS = {
    "on the device": {"strategy": "fsdp"},
    "kept gathered": {"strategy": "shard_grad_op"},
    "replicated parameters": {"strategy": "zero2"},
    "in host memory": {"strategy": "fsdp", "offload_states": True},
    "some in host memory": {"strategy": "fsdp", "offload_states": ("blocks.1",), "recompute": "full"},
    "a dynamic order": {"strategy": "fsdp", "dynamic": True},
    "some replicated": {"strategy": "fsdp", "overrides": {"blocks.0": "ddp"}},
    "a mesh of two axes": {"strategy": "fsdp", "mesh": {"replicate": 2, "shard": 1}},
}


@pytest.mark.parametrize("name", ["on the device", "some in host memory", "a dynamic order"])
def test_passes_are_accumulated_before_the_update(name: str) -> None:
    plan = Plan(**{"update": "backward", **PLANS[name]})
    one, other = (run_ranks(accumulated, num_ranks=2, args=(each,)) for each in (plan, replace(plan, update="step")))
    assert one == other


def accumulated(rank: int, plan: Plan) -> list[float]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    losses = []
    for step in range(4):
        for number in range(3):
            with shardwise.accumulate(model, enabled=number < 2):
                loss = cross_entropy(model, batch(3 * step + number, rank))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", PLANS)
def test_updates_inside_backward_train_as_one_process_does(name: str) -> None:
    plan = Plan(**{"update": "backward", **PLANS[name]})
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(GPT, plan, True)), one_process(GPT, num_ranks=2))


class Branching(nn.Module):
    """Its second block is used by some ranks in some steps, and by none in others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, uses: tuple[bool, ...]) -> Tensor:
        for block, is_used in zip(self.blocks, uses, strict=True):
            x = block(x) if is_used else x
        return x


def branching(rank: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Branching()
    plan = Plan(units="class:Sequential", **settings)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    losses = []
    for step in range(6):
        uses = (True, (rank, step) in ((0, 1), (1, 2), (0, 4), (1, 4)), step > 0)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x, uses).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, shardwise.full_state_dict(model)["model"]


@pytest.mark.parametrize("states", [False, True, ("blocks.1",)])
def test_units_that_not_all_ranks_use_are_updated_at_the_end(states: Any) -> None:
    expected = run_ranks(branching, num_ranks=2, args=({"strategy": "fsdp"},))
    found = run_ranks(branching, num_ranks=2, args=({"update": "backward", "offload_states": states},))
    for (losses, weights), (others, theirs) in zip(expected, found, strict=True):
        assert losses == others
        assert all(torch.equal(weights[name], value) for name, value in theirs.items())


def line(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return str(error)
    return ""


def refusals(rank: int) -> dict[str, Any]:
    def prepared(**settings: Any) -> Any:
        torch.manual_seed(0)
        model, batch = MODELS["gpt"]()
        plan = Plan(update="backward", **settings)
        model, optimizer = shardwise.prepare(
            model, adamw(model.parameters()), plan, collectives=make_collectives(late=True, rank=rank)
        )
        return model, optimizer, lambda step: cross_entropy(model, batch(step, rank))

    model, optimizer, loss = prepared()
    loss(0).backward()
    left = sum(part.parameter.grad is not None for flat in engine_of(model).core.flats for part in flat.master.owned)
    clipped = line(lambda: shardwise.clip_grad_norm_(model, 1.0))
    scaler = shardwise.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaled = line(lambda: scaler.unscale_(optimizer))
    again = line(lambda: loss(1).backward())
    model, optimizer, loss = prepared()
    with shardwise.accumulate(model):
        loss(0).backward()
    loss(1).backward()
    optimizer.step()
    return {"left": left, "clipped": clipped, "scaled": scaled, "again": again}


def disagreement(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(update="backward"))

    def backward(step: int) -> None:
        cross_entropy(model, batch(step, rank)).backward()

    backward(0)
    between = line(lambda: shardwise.full_state_dict(model, optimizer))
    optimizer.step()
    optimizer.zero_grad()
    shardwise.full_state_dict(model, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    return {
        "between": between,
        "backward": line(lambda: backward(1)),
        "saved": line(lambda: shardwise.full_state_dict(model, optimizer)),
        "held": line(lambda: engine_of(model).check_state(what="a checkpoint")),
        "stepped": line(optimizer.step),
        "again": line(lambda: backward(2)),
    }


def test_ranks_that_disagree_have_updated_and_nothing_can_be_saved_then() -> None:
    for found in run_ranks(disagreement, num_ranks=2):
        assert "lr" in found["backward"]
        for name in ("between", "saved", "held"):
            assert found[name].startswith("update = 'backward': some units are updated"), name
        assert "backward" in found["stepped"]
        assert found["again"]


def written_between_steps(rank: int, update: str) -> list[float]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(
        model, adamw(model.parameters()), Plan(strategy="zero2", precision="bf16", update=update)
    )
    losses = []
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                # By other memory in the second step.
                parameter.data = parameter.data * 0.5 if step == 1 else parameter.mul_(0.5).data
        loss = cross_entropy(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(float(value.double().sum()) for value in shardwise.full_state_dict(model)["model"].values())]


def test_values_that_are_written_between_steps_are_updated_too() -> None:
    at_the_end, inside = (
        run_ranks(written_between_steps, num_ranks=2, args=(update,)) for update in ("step", "backward")
    )
    assert at_the_end == inside


def test_what_comes_between_backward_and_step_is_refused() -> None:
    for found in run_ranks(refusals, num_ranks=2):
        assert found["left"] == 0
        assert found["clipped"].startswith("clip_grad_norm_ with update = 'backward'")
        assert found["scaled"].startswith("a GradScaler with update = 'backward'")
        assert "a second backward before optimizer.step()" in found["again"]
