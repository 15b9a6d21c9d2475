"""What one rank does alone: saving and evaluating work where it has all parameters, else all ranks get one line."""

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from test_evaluating import steps
from torch import Tensor
from training import line, make_collectives
from whole import whole

import shardwise
from shardwise import Plan

PLANS = {name: Plan(strategy=name) for name in ("ddp", "zero1", "zero2", "fsdp")}
PLANS["ddp, bf16"] = Plan(strategy="ddp", precision="bf16")


def prepared(name: str, *, rank: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    collectives = make_collectives(late=True, rank=rank)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), PLANS[name], collectives=collectives)
    return model, optimizer, batch


def alone(rank: int, name: str) -> dict[str, Tensor]:
    """Between two steps and after the last one, rank 0 saves and evaluates, and the other one takes no part."""
    model, optimizer, batch = prepared(name, rank=rank)
    for first in (0, 2):
        steps(model, optimizer, batch, rank=rank, first=first)
        if rank == 0:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            plain, _ = MODELS["gpt"]()
            plain.load_state_dict(torch.load(file))
            copied, inputs = deepcopy(model), batch(50, rank)[0]
            with torch.no_grad():
                found = model(inputs)
                if PLANS[name].precision == "fp32":
                    assert torch.equal(found, plain(inputs))
                assert torch.equal(copied(inputs), plain(inputs))
            streamed, values = dict(shardwise.weight_stream(model)), plain.state_dict()
            assert all(torch.equal(streamed[key], value) for key, value in values.items())
            with shardwise.whole(model):
                assert all(torch.equal(p, values[key]) for key, p in model.named_parameters())
            if PLANS[name].strategy == "ddp":
                state = shardwise.full_state_dict(model, optimizer)["optimizer"]["state"]
                assert state.keys() == values.keys() & dict(model.named_parameters()).keys()
                assert len(optimizer.state_dict()["state"]) == len(state)
    return shardwise.full_state_dict(model)["model"]


def together(rank: int, name: str) -> dict[str, Tensor]:
    model, optimizer, batch = prepared(name, rank=rank)
    steps(model, optimizer, batch, rank=rank, first=0, num_steps=4)
    return shardwise.full_state_dict(model)["model"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["ddp", "zero2", *whole("zero1", "ddp, bf16")])
def test_a_rank_saves_and_evaluates_replicated_parameters_alone_and_training_continues_bit_for_bit(name: str) -> None:
    expected, _ = run_ranks(together, num_ranks=2, args=(name,))
    for weights in run_ranks(alone, num_ranks=2, args=(name,)):
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def in_different_calls(rank: int) -> tuple[str, str]:
    model, optimizer, batch = prepared("fsdp", rank=rank)
    steps(model, optimizer, batch, rank=rank, first=0)
    inputs = batch(0, rank)[0]

    def evaluate() -> None:
        with torch.no_grad():
            model(inputs)

    said = line(evaluate if rank == 0 else model.state_dict)
    # Both go on from here together.
    evaluate()
    also_said = line(optimizer.state_dict if rank == 0 else lambda: model(inputs))
    steps(model, optimizer, batch, rank=rank, first=2)
    return said, also_said


@pytest.mark.timeout(60)
def test_ranks_in_different_calls_that_need_all_of_them_say_so_at_once_and_can_continue() -> None:
    evaluation, after = "a forward without gradients (generate, an evaluation)", "a step after an evaluation"
    (said, also_said), (other_said, other_also_said) = run_ranks(in_different_calls, num_ranks=2)
    way = ": each of them needs all ranks; call both on every rank"
    assert said == f"rank 0 in {evaluation} and rank 1 in state_dict{way}"
    assert other_said == f"rank 1 in state_dict and rank 0 in {evaluation}{way}"
    assert also_said == f"rank 0 in optimizer.state_dict and rank 1 in {after}{way}"
    assert other_also_said == f"rank 1 in {after} and rank 0 in optimizer.state_dict{way}"
