"""Ranks compare what they have issued before each update: a collective in another's place is caught in that step."""

from typing import Any

import pytest
import torch
from late import LateCollectives
from ranks import run_ranks
from torch import nn
from training import line
from whole import whole
from wrong import WIDTH, Blocks, WrongCollectives

from shardwise.comm.groups.collectives import BackendCollectives
from shardwise.comm.groups.issued import first_difference
from shardwise.engine.engine import engine_of
from shardwise.engine.guards.same_order import coefficient, count_bits
from shardwise.engines import prepare
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh


def prepared(plan: Plan, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, plan, **options)
    return model, optimizer


def backward(model: nn.Module, rank: int) -> None:
    model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, num_steps: int) -> None:
    for _ in range(num_steps):
        backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()


def swaps(rank: int, fault: str, strategy: str, late: bool) -> str:
    """Rank 1 issues two of a kind in the other order, in its third step; what the step raises."""
    inner = LateCollectives(BackendCollectives(), seed=rank) if late else BackendCollectives()
    wrong = WrongCollectives(inner, fault=fault)
    # Two at once, else each is waited for before the next; and a bucket for each block, else there is one.
    plan = Plan(strategy=strategy, reduces_in_flight=2, prefetch=2, bucket_bytes=1)
    model, optimizer = prepared(plan, collectives=wrong, watch_seconds=0)
    train(model, optimizer, rank, num_steps=2)
    masters = [flat.master.values.clone() for flat in engine_of(model).core.flats]
    wrong.armed = rank == 1
    if strategy == "zero1" and "gather" in fault:
        # It gathers after an update: the next step finds out.
        train(model, optimizer, rank, num_steps=1)
        masters = [flat.master.values.clone() for flat in engine_of(model).core.flats]
    refused = line(lambda: backward(model, rank))
    assert all(
        torch.equal(flat.master.values, master)
        for flat, master in zip(engine_of(model).core.flats, masters, strict=True)
    )
    return refused


@pytest.mark.ledger("gathers-swapped", outcome="refused")
@pytest.mark.parametrize(
    ("fault", "strategy", "late"),
    [
        ("swap reduce", "ddp", False),
        ("swap gather", "fsdp", False),
        *whole(
            ("swap reduce", "fsdp", False),
            ("swap reduce", "zero2", False),
            ("swap gather", "zero1", False),
            ("swap reduce", "fsdp", True),
            ("swap gather", "fsdp", True),
        ),
    ],
)
def test_two_collectives_of_equal_size_in_the_wrong_order_are_refused_on_every_rank(
    fault: str, strategy: str, late: bool
) -> None:
    for refused in run_ranks(swaps, num_ranks=2, args=(fault, strategy, late)):
        kind = fault.split()[1]
        assert "ranks issued different collectives in one step: as number " in refused
        assert f"rank 0 issued {kind} blocks." in refused
        assert f"rank 1 {kind} blocks." in refused


def evaluates_unevenly(rank: int) -> str:
    model, optimizer = prepared(Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=2)))
    train(model, optimizer, rank, num_steps=2)
    with torch.no_grad():
        for _ in range(1 + rank // 2):
            model(torch.zeros(2, WIDTH))
    train(model, optimizer, rank, num_steps=1)
    return "trained"


def test_groups_of_a_mesh_may_evaluate_more_often_than_others() -> None:
    assert run_ranks(evaluates_unevenly, num_ranks=4) == ["trained"] * 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64, 16_383, 16_384, 65_536])
def test_the_flag_counts_all_ranks_and_the_hash_is_not_touched(num_ranks: int) -> None:
    assert num_ranks < 2 ** count_bits(num_ranks)
    assert 32 - count_bits(num_ranks) >= 15


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64, 1000, 16_384])
def test_coefficients_add_up_to_nothing_but_no_part_of_them_does(num_ranks: int) -> None:
    all_of_them = [coefficient(rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sum(all_of_them) == 0
    for some in (all_of_them[:1], all_of_them[: num_ranks // 2], all_of_them[::2], all_of_them[1:]):
        if 0 < len(some) < num_ranks:
            assert sum(some) % 2**18 != 0


def test_the_first_difference_is_named_with_both_ranks() -> None:
    issued = {0: {"gather": ["a", "b", "c"]}, 1: {"gather": ["a", "c", "b"]}, 2: {"gather": ["a", "b"]}}
    assert first_difference(issued, ended=True) == "as number 2 of the gather group, rank 0 issued b, rank 1 c"
    del issued[1]
    assert first_difference(issued, ended=True).endswith(
        "as number 3 of the gather group, rank 0 issued c, rank 2 nothing more"
    )
    assert first_difference(issued, ended=False) == ""


def flips_a_bit(rank: int, strategy: str, precision: str) -> list[str]:
    """Rank 1's copy of one element changes in its last bit after the fourth step; steps until that is refused."""
    plan = Plan(strategy=strategy, precision=precision, mesh=Mesh(replicate=2, shard=1) if strategy == "fsdp" else None)
    model, optimizer = prepared(plan, compare_every=3)
    train(model, optimizer, rank, num_steps=4)
    flat = engine_of(model).core.flats[2]
    if rank == 1:
        flat.master.values[flat.master.owned[1].start :].view(torch.int32)[:1].bitwise_xor_(1)
    train(model, optimizer, rank, num_steps=1)
    before = flat.master.values.clone()
    backward(model, rank)
    refused = line(optimizer.step)
    assert torch.equal(flat.master.values, before)
    return [refused, flat.names[1]]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), *whole(("fsdp", "bf16"))],
)
def test_a_flipped_bit_in_one_replica_is_found_at_the_next_comparison(strategy: str, precision: str) -> None:
    for refused, name in run_ranks(flips_a_bit, num_ranks=2, args=(strategy, precision)):
        assert f"{name} is no longer the same on all ranks: rank 0 and rank 1 differ" in refused


def flips_one_of_three(rank: int) -> str:
    model, optimizer = prepared(Plan(strategy="ddp"), compare_every=1)
    train(model, optimizer, rank, num_steps=1)
    if rank == 1:
        engine_of(model).core.flats[0].full.buffer.view(torch.int32)[:1].bitwise_xor_(1 << 20)
    backward(model, rank)
    return line(optimizer.step)


def test_of_three_ranks_the_one_that_differs_is_named() -> None:
    for refused in run_ranks(flips_one_of_three, num_ranks=3):
        assert "blocks.0.linear.weight is no longer the same on all ranks: rank 1 differs from the others" in refused


def flips_a_gathered_bit(rank: int) -> str:
    """Under zero1 each rank holds all parameters, and steps a slice: a flipped bit in another's slice is gathered over
    after the next update, so only a comparison before that can see it.
    """
    model, optimizer = prepared(Plan(strategy="zero1"), compare_every=2)
    train(model, optimizer, rank, num_steps=1)
    engine_of(model).core.wait_gathers()
    if rank == 1:
        engine_of(model).core.flats[0].full.buffer.view(torch.int32)[:1].bitwise_xor_(1)
    backward(model, rank)
    return line(optimizer.step)


def test_a_flipped_bit_in_what_another_rank_steps_is_found_too() -> None:
    for refused in run_ranks(flips_a_gathered_bit, num_ranks=2):
        assert "blocks.0.linear.weight is no longer the same on all ranks" in refused


def compares_always(rank: int, strategy: str) -> int:
    model, optimizer = prepared(Plan(strategy=strategy, precision="bf16"), compare_every=1)
    train(model, optimizer, rank, num_steps=4)
    return len(engine_of(model).guards.replicas._replicas)


@pytest.mark.parametrize(("strategy", "num_compared"), [("ddp", 8), ("zero1", 4), ("zero2", 4), ("fsdp", 0)])
def test_what_is_alike_is_never_refused(strategy: str, num_compared: int) -> None:
    """Of four blocks: their full buffers where these are replicated, and their masters where those are too."""
    assert run_ranks(compares_always, num_ranks=2, args=(strategy,)) == [num_compared] * 2


def follows_its_own_loss(rank: int, strategy: str) -> list[str]:
    """A scheduler halves the rate of rank 1, whose loss it was given; what the next step raises."""
    model, optimizer = prepared(Plan(strategy=strategy))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train(model, optimizer, rank, num_steps=2)
    for loss in (1.0, 0.5 + rank):
        scheduler.step(loss)
    masters = [flat.master.values.clone() for flat in engine_of(model).core.flats]
    refused = line(lambda: backward(model, rank))
    assert all(
        torch.equal(flat.master.values, master)
        for flat, master in zip(engine_of(model).core.flats, masters, strict=True)
    )
    return [refused]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp", "zero1")])
def test_a_learning_rate_that_differs_between_ranks_is_named_before_the_update(strategy: str) -> None:
    for (refused,) in run_ranks(follows_its_own_loss, num_ranks=2, args=(strategy,)):
        assert "param_groups[0]['lr'] is 0.1 on rank 0, 0.05 on rank 1" in refused
        assert "all_reduce(loss) before scheduler.step(loss)" in refused


def differs_in_last_digits(rank: int) -> str:
    """Ranks whose schedules differ by rounding, and an optimizer that only rank 0 still holds."""
    model, optimizer = prepared(Plan(strategy="fsdp"))
    dropped = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, rank)
    dropped.step()
    dropped.zero_grad()
    held = dropped if rank == 0 else None
    del dropped
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank * 1e-15)
    train(model, optimizer, rank, num_steps=2)
    return "trained" if held is None or held.param_groups else ""


def test_rates_that_differ_by_rounding_and_a_dropped_optimizer_are_no_difference() -> None:
    assert run_ranks(differs_in_last_digits, num_ranks=2) == ["trained"] * 2
