"""Updates inside backward: the same training, without a full set of gradients."""

from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from training import Case, assert_equal, make_collectives, on_ranks, one_process

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan
from shardwise.tasks import cross_entropy

GPT = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)
PLANS = {
    "on the device": {"strategy": "fsdp"},
    "kept gathered": {"strategy": "shard_grad_op"},
    "replicated parameters": {"strategy": "zero2"},
    "in host memory": {"strategy": "fsdp", "offload_states": True},
    "some in host memory": {"strategy": "fsdp", "offload_states": ("blocks.1",), "recompute": "full"},
    "some replicated": {"strategy": "fsdp", "overrides": {"blocks.0": "ddp"}},
    "a mesh of two axes": {"strategy": "fsdp", "mesh": {"replicate": 2, "shard": 1}},
}


@pytest.mark.parametrize("name", PLANS)
def test_updates_inside_backward_train_as_one_process_does(name: str) -> None:
    plan = Plan(**{"update": "backward", **PLANS[name]})
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(GPT, plan, True)), one_process(GPT, num_ranks=2))


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
    left = sum(part.parameter.grad is not None for flat in engine_of(model).flats for part in flat.owned)
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


def test_what_comes_between_backward_and_step_is_refused() -> None:
    for found in run_ranks(refusals, num_ranks=2):
        assert found["left"] == 0
        assert found["clipped"].startswith("clip_grad_norm_ with update = 'backward'")
        assert found["scaled"].startswith("a GradScaler with update = 'backward'")
        assert "a second backward before optimizer.step()" in found["again"]
