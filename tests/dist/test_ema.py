"""`shardwise.EMA`: averages in slices, equal to those of one process, applied, saved and loaded on other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import make_adapted, one_step
from cases import GPT, adamw, make_tokens
from ranks import run_ranks
from torch import Tensor, nn
from training import line, make_collectives

import shardwise
from shardwise.checkpoint import Checkpoints, open_checkpoint
from shardwise.engine.engine import engine_of, tape
from shardwise.engine.prepared.inventory import held_bytes
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

DECAY = 0.75
PLANS = [Plan(strategy=strategy) for strategy in STRATEGIES]


def prepared(plan: Plan, *, rank: int = 0) -> Any:
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    return model, optimizer, batch, shardwise.EMA(model, DECAY)


def train(model: nn.Module, optimizer: Any, ema: Any, batch: Any) -> None:
    cross_entropy(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()


def averages_of(ema: Any, model: nn.Module) -> dict[str, Tensor]:
    with ema.applied():
        return {name: value.clone() for name, value in model.state_dict().items()}


def averaged(rank: int, plan: Plan | None) -> tuple[dict[str, Tensor], Tensor]:
    """Three steps; the averages, and what the model computes with them. Without a plan, in one process."""
    if plan is not None:
        model, optimizer, batch, ema = prepared(plan, rank=rank)
        for step in range(3):
            train(model, optimizer, ema, batch(step, rank))
        own = model.state_dict()
        with ema.applied(), torch.no_grad():
            found = model(batch(9, 0)[0])
            values = model.state_dict()
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
        # And it trains on.
        train(model, optimizer, ema, batch(3, rank))
        return values, found
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    optimizer = adamw(model.parameters())
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(3):
        one_step(model, [batch(step, 0), batch(step, 1)])
        optimizer.step()
        optimizer.zero_grad()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 1 - DECAY)
    with torch.no_grad():
        for average, parameter in zip(averages, model.parameters(), strict=True):
            parameter.copy_(average)
        return model.state_dict(), model(batch(9, 0)[0])


def test_the_average_is_that_of_one_process_bit_for_bit_under_every_strategy() -> None:
    ((expected, computed),) = run_ranks(averaged, num_ranks=1, args=(None,))
    for plan in PLANS:
        for values, found in run_ranks(averaged, num_ranks=2, args=(plan,)):
            assert all(torch.equal(values[name], expected[name]) for name in expected), plan
            assert torch.equal(found, computed), plan


def test_in_bf16_strategies_average_the_masters_alike() -> None:
    results = [
        result
        for strategy in ("ddp", "zero1", "fsdp")
        for result in run_ranks(averaged, num_ranks=2, args=(Plan(strategy=strategy, precision="bf16"),))
    ]
    expected, computed = results[0]
    assert any((value != value.bfloat16().float()).any() for value in expected.values())
    for values, found in results[1:]:
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert torch.equal(found, computed)


def silent(rank: int) -> None:
    for plan in PLANS:
        model, optimizer, batch, ema = prepared(plan, rank=rank)
        train(model, optimizer, ema, batch(0, rank))
        late = engine_of(model).core.setting.collectives
        with tape(model) as recorded:
            late.issued.clear()
            recorded.take()
            ema.update()
            assert not recorded.take()
            assert not late.issued
        num_bytes = sum(average.nbytes for average in ema.tensors())
        whole = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert num_bytes < (1.1 if plan.strategy == "ddp" else 0.6) * whole
        before = held_bytes(model, optimizer)["optim"]
        del ema
        assert before - held_bytes(model, optimizer)["optim"] == num_bytes


def test_an_update_issues_no_collective_and_the_slice_that_is_held_is_counted() -> None:
    run_ranks(silent, num_ranks=2)


# Checkpoints


def saves(rank: int, folder: str, plan: Plan) -> dict[str, Tensor]:
    checkpoints = Checkpoints(folder)
    model, optimizer, batch, ema = prepared(plan, rank=rank)
    for step in range(2):
        train(model, optimizer, ema, batch(step, rank))
    checkpoints.save(model, optimizer, step=2, ema=ema)
    saved = checkpoints.latest()
    with ema.applied():
        for mistake in (
            lambda: checkpoints.save(model, optimizer, step=3),
            lambda: checkpoints.save(model, step=3, ema=ema),
            lambda: checkpoints.load(saved, model),
            lambda: model.load_state_dict({}),
            lambda: shardwise.edit(model).__enter__(),
        ):
            assert "inside `with ema.applied():`" in line(mistake)
    checkpoints.close()
    return averages_of(ema, model)


def loads(rank: int, folder: str, plan: Plan, expected: dict[str, Tensor]) -> None:
    checkpoints = Checkpoints(folder)
    model, optimizer, _, ema = prepared(plan, rank=rank)
    ema.decay = 0.1
    checkpoints.load(checkpoints.latest(), model, optimizer, ema=ema)
    assert (ema.decay, ema.num_updates) == (DECAY, 2)
    found = averages_of(ema, model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    checkpoints.close()


def test_checkpoints_carry_it_to_other_strategies_and_numbers_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(saves, num_ranks=2, args=(str(tmp_path), Plan(strategy="fsdp")))[0]
    run_ranks(loads, num_ranks=3, args=(str(tmp_path), Plan(strategy="zero2"), expected))
    run_ranks(loads, num_ranks=1, args=(str(tmp_path), Plan(strategy="ddp"), expected))
    (saved,) = tmp_path.iterdir()
    assert open_checkpoint(saved).manifest.contents.ema is not None


def loads_none(rank: int, folder: str) -> list[str]:
    checkpoints = Checkpoints(folder)
    model, optimizer, _, ema = prepared(Plan())
    checkpoints.save(model, optimizer, step=1)
    saved = checkpoints.latest()
    said = [line(lambda: checkpoints.load(saved, model, optimizer, ema=ema))]
    checkpoints.save(model, optimizer, step=2, ema=ema)
    saved = checkpoints.latest()
    model.blocks[0].requires_grad_(False)
    said.append(line(lambda: checkpoints.load(saved, model, optimizer, ema=shardwise.EMA(model, DECAY))))
    checkpoints.close()
    return said


def test_a_checkpoint_without_it_or_of_other_parameters_is_refused(tmp_path: Path) -> None:
    (said,) = run_ranks(loads_none, num_ranks=1, args=(str(tmp_path),))
    assert "holds no EMA" in said[0]
    assert "has an average only in the checkpoint" in said[1]


# Frozen parameters, and mistakes


def adapted(rank: int, plan: Plan) -> list[str]:
    torch.manual_seed(3)
    model, batch = make_adapted()
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    ema = shardwise.EMA(model, DECAY)
    assert "embedding.weight" not in ema.names()
    assert "blocks.0.linear.up.weight" in ema.names()
    train(model, optimizer, ema, batch(0, rank))
    said = [line(lambda: shardwise.EMA(model, 1.5)), line(lambda: shardwise.EMA(nn.Linear(2, 2), 0.5))]
    with ema.applied():
        said.append(line(lambda: cross_entropy(model, batch(1, rank))))
        said.append(line(optimizer.step))
    model.requires_grad_(True)
    said.append(line(ema.update))
    return said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_parameters_have_no_average_and_mistakes_are_one_line(strategy: str) -> None:
    for said in run_ranks(adapted, num_ranks=2, args=(Plan(strategy=strategy, units="class:AdaptedBlock"),)):
        assert said[0] == "decay = 1.5: must be a number from 0 to 1"
        assert said[1].startswith("shardwise.EMA needs a model of shardwise.prepare")
        assert said[2] == "a forward that trains inside `with ema.applied():`: do it after the block"
        assert said[3].startswith("optimizer.step() inside")
        assert "was frozen when shardwise.EMA was made" in said[4]
