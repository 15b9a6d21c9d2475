"""The naive executor (program/naive.py) and the engine train to the same bits, under every strategy."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import MODELS, adamw, by_weight_decay, sgd
from ranks import run_ranks
from torch import Tensor, nn
from whole import strategies, whole

import shardwise
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS, STRATEGIES, Mesh
from shardwise.program.naive import NaiveExecutor

# The batches of each step; those of the second one are added up.
STEPS = ([0], [1, 5], [2], [3])

LossOf = Callable[[nn.Module, int], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def by_engine(model: nn.Module, loss_of: LossOf, make_optimizer: MakeOptimizer, plan: Plan) -> dict[str, Tensor]:
    optimizer = make_optimizer(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    for numbers in STEPS:
        for number in numbers:
            with shardwise.accumulate(model, enabled=number != numbers[-1]):
                loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardwise.full_state_dict(model)["model"]


def by_naive(model: nn.Module, loss_of: LossOf, make_optimizer: MakeOptimizer, plan: Plan) -> dict[str, Tensor]:
    naive = NaiveExecutor(model, make_optimizer(model.parameters()), plan)
    for numbers in STEPS:
        naive.step(*(partial(loss_of, number=number) for number in numbers))
    for unit in naive.params:
        naive.gather(unit)
    return model.state_dict()


def trained(rank: int, way: Any, name: str, make_optimizer: MakeOptimizer, plan: Plan) -> tuple[list[float], Any]:
    """The losses of this rank, and the parameters and buffers at the end."""
    torch.manual_seed(1234)
    model, batch = MODELS[name]()
    losses: list[float] = []

    def loss_of(model: nn.Module, number: int) -> Tensor:
        loss = cross_entropy(model, batch(number, rank))
        losses.append(loss.item())
        # A sum of more than two depends on its order: of four ranks, two have gradients other than 0, in turn.
        return loss * float(torch.distributed.get_world_size() == 2 or (rank + number) % 4 < 2)

    return losses, way(model, loss_of, make_optimizer, plan)


def compare(rank: int, name: str, make_optimizer: MakeOptimizer, plan: Plan) -> list[float]:
    losses, values = trained(rank, by_naive, name, make_optimizer, plan)
    expected_losses, expected = trained(rank, by_engine, name, make_optimizer, plan)
    assert losses == expected_losses
    assert values.keys() == expected.keys()
    assert [key for key, value in values.items() if bits(value) != bits(expected[key])] == []
    return losses


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def assert_equal(plan: Plan, *, model: str = "gpt", make_optimizer: MakeOptimizer = adamw, num_ranks: int = 2) -> None:
    results = run_ranks(compare, num_ranks=num_ranks, args=(model, make_optimizer, plan), timeout_seconds=60)
    # They have trained, each rank on batches of its own.
    assert len({tuple(losses) for losses in results}) == num_ranks
    assert all(len(set(losses)) == 5 for losses in results)


@pytest.mark.parametrize("make_optimizer", [adamw, sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engine_is_bit_equal_to_the_naive_executor(strategy: str, make_optimizer: MakeOptimizer) -> None:
    assert_equal(Plan(strategy=strategy, bucket_bytes=4000), make_optimizer=make_optimizer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_are_bit_equal_on_replicas(strategy: str) -> None:
    assert_equal(Plan(strategy=strategy, mesh=Mesh(replicate=2)))


@pytest.mark.parametrize("strategy", strategies("fsdp"))
def test_they_are_bit_equal_on_a_mesh_of_two_axes(strategy: str) -> None:
    assert_equal(Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=2)), num_ranks=4)


@pytest.mark.parametrize("across", ACROSS[1:])
@pytest.mark.parametrize(("strategy", "shard"), [("fsdp", 2), ("shard_grad_op", 1), *whole(("shard_grad_op", 2))])
def test_they_are_bit_equal_where_states_are_sharded_over_all_ranks(strategy: str, shard: int, across: str) -> None:
    plan = Plan(strategy=strategy, across=across, mesh=Mesh(replicate=2, shard=shard), piece_bytes=300)
    assert_equal(plan, num_ranks=2 * shard)


def test_they_are_bit_equal_where_few_units_are_sharded_over_all_ranks() -> None:
    overrides = {"blocks.0": "ddp", "blocks.1": "fsdp", "blocks.2": "zero1"}
    assert_equal(
        Plan(strategy="zero2", across="zero2", overrides=overrides, mesh=Mesh(replicate=2, shard=2)), num_ranks=4
    )


def test_they_are_bit_equal_where_units_differ() -> None:
    overrides = {"blocks.0": "ddp", "blocks.1": "fsdp", "blocks.2": "zero1"}
    assert_equal(Plan(strategy="zero2", overrides=overrides), make_optimizer=by_weight_decay)


def test_they_are_bit_equal_where_gradients_are_reduced_in_pieces() -> None:
    assert_equal(Plan(strategy="fsdp", piece_bytes=300))


def test_they_are_bit_equal_where_a_model_has_buffers() -> None:
    assert_equal(Plan(strategy="shard_grad_op"), model="resnet")


def test_the_naive_executor_needs_nothing_of_the_engine() -> None:
    code = "import sys, shardwise.program.naive; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "shardwise.program.naive" in loaded
    assert [name for name in loaded if name.startswith(("shardwise.engine", "shardwise.comm"))] == []
