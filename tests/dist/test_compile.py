"""Units that torch.compile has compiled train as they do without."""

import shutil
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from training import make_collectives
from whole import whole

import shardwise
from shardwise.plan import Plan
from shardwise.tasks import cross_entropy


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
        losses = []
        for step in range(3):
            loss = cross_entropy(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    torch._dynamo.reset()
    if backend == "aot_eager":
        assert results[0] == results[1]
    else:
        assert results[0] == pytest.approx(results[1], rel=1e-5)


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
        ("fsdp", "in place", "before"),
        *whole(("zero2", "forward", "after"), ("shard_grad_op", "wrapped", "before")),
    ],
)
def test_a_compiled_unit_trains_the_same(strategy: str, form: str, when: str) -> None:
    run_ranks(compiled, num_ranks=2, args=(strategy, "aot_eager", form, when))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_unit_compiled_by_inductor_trains_the_same() -> None:
    run_ranks(compiled, num_ranks=2, args=("fsdp", "inductor", "in place", "before"))
