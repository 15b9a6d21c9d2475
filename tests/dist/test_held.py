"""What is sharded falls as 1/N on each rank, and nothing is held twice."""

import pytest
import torch
from cases import adamw
from ranks import run_ranks
from whole import strategies, whole

from shardwise.engine.prepared.inventory import held_bytes
from shardwise.engines import prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES

# Wide enough that padding is nothing.
SHAPE = GPTShape(num_layers=3, width=256, num_heads=4, vocab_size=256, max_seq=8)


def held(rank: int, strategy: str, precision: str) -> list[dict[str, int]]:
    """After backward, after zero_grad, and in the middle of backward."""
    model = build_model(SHAPE)
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy, precision=precision))
    for _ in range(2):
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        cross_entropy(model, (tokens, tokens)).backward()
        before = held_bytes(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens)
    return [before, held_bytes(model, optimizer)]


@pytest.mark.parametrize("num_ranks", [4, *whole(2)])
@pytest.mark.parametrize("strategy", strategies("zero1", "zero2", "fsdp"))
def test_what_is_sharded_falls_with_the_number_of_ranks(strategy: str, num_ranks: int) -> None:
    placement = STRATEGIES[strategy]
    whole = 4 * SHAPE.num_params
    for before, after in run_ranks(held, num_ranks=num_ranks, args=(strategy, "fp32")):
        expected = {
            "params": whole / (num_ranks if placement.params is SHARDED else 1),
            "grads": whole / (num_ranks if placement.grads is SHARDED else 1),
            "optim": 2 * whole / (num_ranks if placement.optim is SHARDED else 1),
        }
        for name, num_bytes in expected.items():
            assert before[name] == pytest.approx(num_bytes, rel=0.01), name
        assert before["gathered"] == after["gathered"] == 0
        if placement.grads is SHARDED:
            assert after["grads"] == 0


@pytest.mark.parametrize("strategy", strategies("fsdp"))
def test_in_bf16_the_master_belongs_to_the_optimizer(strategy: str) -> None:
    placement = STRATEGIES[strategy]
    whole = 4 * SHAPE.num_params
    for before, _ in run_ranks(held, num_ranks=2, args=(strategy, "bf16")):
        assert before["params"] == pytest.approx(0 if placement.params is SHARDED else whole / 2, rel=0.01)
        assert before["optim"] == pytest.approx(3 * whole / (2 if placement.optim is SHARDED else 1), rel=0.01)
        assert before["grads"] == pytest.approx(whole / (2 if placement.grads is SHARDED else 1), rel=0.01)
