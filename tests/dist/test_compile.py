"""Units that torch.compile has compiled train as they do without."""

import shutil
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MODELS, adamw, sgd
from ranks import run_ranks
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion
from training import make_collectives
from whole import whole

import shardwise
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan


def compiled(rank: int, strategy: str, backend: str, form: str, when: str) -> None:
    results = []
    for with_compile in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = MODELS["gpt"]()
        if with_compile and when == "before":
            compile_block(model, backend=backend, form=form)
        optimizer = adamw(model.parameters())
        collectives = make_collectives(late=True, rank=rank)
        plan = Plan(strategy=strategy, units="class:Block")
        shardwise.prepare(model, optimizer, plan, collectives=collectives)
        if with_compile and when == "after":
            compile_block(model, backend=backend, form=form)
        results.append(losses_of(model, optimizer, batch, rank))
    torch._dynamo.reset()
    if backend == "aot_eager":
        assert results[0] == results[1]
    else:
        assert results[0] == pytest.approx(results[1], rel=1e-5)


def losses_of(model: Any, optimizer: torch.optim.Optimizer, batch: Any, rank: int) -> list[float]:
    """Of three steps."""
    losses = []
    for step in range(3):
        loss = cross_entropy(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compile_block(model: Any, *, backend: str, form: str) -> None:
    """One of the three; compiling takes seconds."""
    block = model.blocks[1]
    if form == "in place":
        block.compile(backend=backend)
    elif form == "forward":
        block.forward = torch.compile(block.forward, backend=backend)
    else:
        model.blocks[1] = torch.compile(block, backend=backend)


@pytest.mark.parametrize(
    ("strategy", "form", "when"),
    [
        *whole(("fsdp", "in place", "before"), ("zero2", "forward", "after"), ("shard_grad_op", "wrapped", "before")),
    ],
)
def test_a_compiled_unit_trains_the_same(strategy: str, form: str, when: str) -> None:
    run_ranks(compiled, num_ranks=2, args=(strategy, "aot_eager", form, when))


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_unit_compiled_by_inductor_trains_the_same() -> None:
    run_ranks(compiled, num_ranks=2, args=("fsdp", "inductor", "in place", "before"))


def by_plan(rank: int, plan: Plan) -> tuple[list[float], int]:
    """Losses, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    losses = losses_of(model, optimizer, batch, rank)
    num_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return losses, num_graphs


def compiled_by_plans(rank: int, plans: list[Plan]) -> None:
    for plan in plans:
        expected, _ = by_plan(rank, replace(plan, compile="none"))
        losses, num_graphs = by_plan(rank, plan)
        assert losses == expected, plan
        # The blocks are of one class, and share what was compiled for the first.
        assert num_graphs == 1, plan


@pytest.mark.parametrize(
    "plans",
    [
        *whole([Plan(compile="aot_eager", engine="torch", strategy="ddp")]),
        # Blocks of one class that are compiled as they are, to be recomputed whole, and not at all.
        [Plan(compile="aot_eager", recompute_overrides={"blocks.1": "full", "blocks.2": "selective"})],
        *whole([Plan(compile="aot_eager", recompute="full")]),
        *whole([Plan(compile="aot_eager"), Plan(compile="aot_eager", engine="torch", strategy="fsdp")]),
    ],
    ids=["torch", "mixed", "recomputed", "others"],
)
def test_a_plan_that_compiles_trains_the_same_on_both_engines_and_compiles_blocks_of_a_class_once(
    plans: list[Plan],
) -> None:
    run_ranks(compiled_by_plans, num_ranks=2, args=(plans,))


def copied(rank: int) -> None:
    model, _ = MODELS["gpt"]()
    model, _ = shardwise.prepare(model, adamw(model.parameters()), Plan(compile="aot_eager"))
    copy = deepcopy(model)
    assert not any("forward" in module.__dict__ for module in copy.modules())
    assert sum("forward" in module.__dict__ for module in model.modules()) == len(model.blocks)


def test_a_copy_of_a_compiled_model_is_not_compiled() -> None:
    run_ranks(copied, num_ranks=1)


def compiled_around(rank: int, strategy: str) -> None:
    """torch.compile of the whole model before prepare, and of the optimizer's step after it."""
    results = []
    for with_compile in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = MODELS["gpt"]()
        if with_compile:
            model = torch.compile(model, backend="eager")
        optimizer = sgd(model.parameters())
        prepared, _ = shardwise.prepare(model, optimizer, Plan(strategy=strategy))
        assert prepared is model
        # The compiled SGD of torch 2.11 rounds otherwise than its ordinary one, also without us.
        if with_compile and torch.__version__ >= TorchVersion("2.13"):
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        losses = losses_of(model, optimizer, batch, rank)
        state = shardwise.full_state_dict(model)["model"]
        # torch.compile names parameters so.
        results.append((losses, {name.removeprefix("_orig_mod."): value for name, value in state.items()}))
    assert counters["frames"]["ok"] > 0
    torch._dynamo.reset()
    (losses, plain), (other, compiled) = results
    assert losses == other
    assert plain.keys() == compiled.keys()
    assert all(torch.equal(compiled[name], value) for name, value in plain.items())


@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp", "zero2")])
def test_a_model_compiled_before_prepare_and_a_compiled_step_train_as_they_do_without(strategy: str) -> None:
    run_ranks(compiled_around, num_ranks=2, args=(strategy,), timeout_seconds=90)
