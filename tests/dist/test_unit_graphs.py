"""Units as graphs in loops of all kinds, on simulated graphs: the bits of the same loop without them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import LOOPS, Model
from ranks import run_ranks
from simulated_graphs import simulated

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan

STRATEGIES = ("ddp", "zero2", "shard_grad_op", "fsdp")


def run(
    rank: int,
    loop: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model = Model(**model_options).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.prepare(model, optimizer, Plan(**options))
    torch.manual_seed(5 + rank)
    said: list[Any] = []
    LOOPS[loop](model, optimizer, rank=rank, said=said)
    graphs = engine_of(model).graphs
    counts = (graphs.num_calls, graphs.num_replayed) if graphs is not None else (0, 0)
    return said, shardwise.full_state_dict(model)["model"], counts


def difference(one: Any, other: Any) -> str:
    """Describe the first difference between two runs; "" if all bits are equal."""
    said, values, _ = one
    said_by_other, values_of_other, _ = other
    for number, (first, second) in enumerate(zip(said, said_by_other, strict=True)):
        if not torch.equal(first, second):
            return f"value {number} of {len(said)}: {first} and {second}"
    return next((name for name, value in values.items() if not torch.equal(value, values_of_other[name])), "")


def compared(rank: int, loop: str, options: dict[str, Any], model_options: dict[str, Any]) -> tuple[int, int]:
    without = run(rank, loop, options, model_options)
    with simulated():
        graphed = run(rank, loop, options, model_options)
    assert not difference(without, graphed)
    return graphed[2]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_loop_with_unit_graphs_has_the_bits_of_the_same_loop_without(loop: str, strategy: str) -> None:
    for num_calls, num_replayed in run_ranks(compared, num_ranks=2, args=(loop, {"strategy": strategy}, {})):
        assert num_replayed > num_calls / 5, (num_calls, num_replayed)


PLANS: dict[str, dict[str, Any]] = {
    "recompute": {"strategy": "fsdp", "recompute": "full"},
    "selective": {"strategy": "zero2", "recompute": "selective"},
    "dynamic": {"strategy": "fsdp", "dynamic": True},
    "bf16": {"strategy": "fsdp", "precision": "bf16"},
    "states on the host": {"strategy": "zero2", "offload_states": True},
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", sorted(PLANS))
def test_it_has_under_other_plans(name: str) -> None:
    for num_calls, num_replayed in run_ranks(
        compared, num_ranks=2, args=("plain", PLANS[name], {"dropout": 0.0 if name == "selective" else 0.1})
    ):
        assert num_replayed > num_calls / 5, (num_calls, num_replayed)


def compared_in_float64(rank: int, strategy: str) -> float:
    options = {"strategy": strategy, "precision": "native"}
    _, values, _ = run(rank, "plain", options, {"skips": True}, dtype=torch.float64)
    with simulated():
        _, values_with, _ = run(rank, "plain", options, {"skips": True}, dtype=torch.float64)
    return max(float((values[name] - values_with[name]).abs().max()) for name in values)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_unit_whose_input_others_use_too_differs_by_rounding_alone(strategy: str) -> None:
    """Its two gradients of that input are added to each other first, and only then to those of others."""
    assert max(run_ranks(compared_in_float64, num_ranks=2, args=(strategy,))) < 1e-9
