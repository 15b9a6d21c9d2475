"""Compiled units take as much less memory than uncompiled ones as the planner says."""

import gc
from typing import Any

import pytest
import torch

import shardwise
from shardwise import Plan
from shardwise.models.shapes import LlamaShape
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import token_task
from shardwise.planner.memory.peak import estimate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_rank"),
]

# Next to what its blocks keep, its logits are nothing.
SHAPE = LlamaShape(num_layers=8, width=1024, num_heads=16, num_kv_heads=4, ffn_width=4096, vocab_size=512, max_seq=1024)
BATCH = 8


@pytest.fixture(autouse=True)
def reset_compiler() -> Any:
    yield
    torch._dynamo.reset()


def peak_bytes(plan: Plan) -> int:
    """The peak of a step, after others."""
    gc.collect()
    torch.cuda.empty_cache()
    task = token_task(SHAPE, device="cuda")
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
    model, _ = shardwise.prepare(task.model, optimizer, plan)
    batch = task.make_batch(BATCH)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_units_take_as_much_less_as_predicted(recompute: str) -> None:
    plans = [
        Plan(strategy="ddp", precision="bf16", capture="off", recompute=recompute, compile=backend)
        for backend in ("none", "inductor")
    ]
    # The first training of a process leaves workspaces behind.
    peak_bytes(plans[0])
    eager, compiled = map(peak_bytes, plans)
    ways = [("bf16", way) for way in ("none", "full", "compiled", "compiled-full")]
    spec = trace_task(token_task(SHAPE, device="meta"), name="llama", ways=ways)
    expected = [estimate(spec, plan=plan, num_ranks=1, batch=BATCH).allocated_bytes for plan in plans]
    assert eager == pytest.approx(expected[0], rel=0.02)
    assert compiled == pytest.approx(expected[1], rel=0.02)
    if recompute == "none":
        assert eager - compiled == pytest.approx(expected[0] - expected[1], rel=0.1)
        assert compiled < 0.95 * eager
