"""Adapters on a quantised base: its bytes are sharded, gathered and freed, and never changed."""

import pytest
import torch
from quantised import WIDTH, Adapted, Int8Linear, QuantisedNet, Scaled
from ranks import run_ranks
from torch import nn
from training import line

from shardwise import Plan, prepare

STRATEGIES = ["ddp", "zero2", "fsdp"]


def train(model: nn.Module, *, index: int, num_ranks: int, plan: Plan | None) -> list[float]:
    """What three steps, of which ranks share the batches, make of the outputs for one input."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if plan is not None:
        prepare(model, optimizer, plan)
    random = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn(4, WIDTH, generator=random)
        # Each half's mean, and the mean of both: sums in the order of two ranks.
        halves = x.chunk(2) if num_ranks == 1 else [x.chunk(2)[index]]
        for half in halves:
            (model(half).square().mean() / len(halves)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [float(value) for value in model(torch.ones(1, WIDTH))[0]]


def trained(rank: int, kind: str, strategy: str, precision: str) -> tuple[list[float], list[int]]:
    """What it computes, and how many bytes of each quantised weight are there between steps."""
    torch.manual_seed(rank)
    model = QuantisedNet(kind)
    found = train(model, index=rank, num_ranks=2, plan=Plan(strategy=strategy, precision=precision))
    held = []
    for block in model.blocks:
        assert isinstance(block, Adapted)
        if isinstance(block.base, Int8Linear):
            assert block.base.state.CB is not None
            held.append(block.base.state.CB.untyped_storage().nbytes())
        else:
            originals = block.base.parametrizations.weight.parameters()
            with torch._C.DisableTorchFunctionSubclass():
                held.append(sum(one.untyped_storage().nbytes() for one in originals))
    return found, held


def as_trained(rank: int, kind: str, strategy: str, precision: str) -> list[float]:
    torch.manual_seed(rank)
    return train(QuantisedNet(kind), index=rank, num_ranks=2, plan=Plan(strategy=strategy, precision=precision))


@pytest.mark.parametrize("kind", ["bitsandbytes nf4", "bitsandbytes int8", "torchao int8"])
def test_so_do_the_libraries_own_weights(kind: str) -> None:
    pytest.importorskip(kind.split()[0])
    (expected,) = run_ranks(alone, num_ranks=1, args=(kind,))
    for strategy in STRATEGIES:
        for found in run_ranks(as_trained, num_ranks=2, args=(kind, strategy, "fp32")):
            assert found == expected


def alone(rank: int, kind: str) -> list[float]:
    torch.manual_seed(0)
    return train(QuantisedNet(kind), index=0, num_ranks=1, plan=None)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["subclass", "int8"])
def test_it_trains_as_in_one_process_though_ranks_began_apart(kind: str, strategy: str) -> None:
    (expected,) = run_ranks(alone, num_ranks=1, args=(kind,))
    for found, held in run_ranks(trained, num_ranks=2, args=(kind, strategy, "fp32")):
        assert found == expected
        assert all((num_bytes == 0) == (strategy == "fsdp") for num_bytes in held)


@pytest.mark.parametrize("kind", ["subclass", "int8"])
def test_no_precision_changes_its_bytes(kind: str) -> None:
    """Scales inside are fp32: rounded to bf16 they would be off by far more than the adapters' precision."""
    (expected,) = run_ranks(alone, num_ranks=1, args=(kind,))
    ranks = [run_ranks(trained, num_ranks=2, args=(kind, strategy, "bf16"))[0][0] for strategy in ("ddp", "fsdp")]
    assert ranks[0] == ranks[1]
    assert ranks[0] == pytest.approx(expected, rel=0.05, abs=0.01)


def trains_a_subclass(rank: int) -> str:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Scaled(torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 1)), requires_grad=True)
    return line(lambda: prepare(model, None, Plan(strategy="ddp")))


def test_one_that_is_trained_is_refused() -> None:
    (refused,) = run_ranks(trains_a_subclass, num_ranks=1)
    assert "weight is a quantised.Scaled, which only a frozen parameter can be: freeze it (requires_grad_(False))" in (
        refused
    )


def of_other_sizes(rank: int) -> str:
    model = nn.Linear(4, 4)
    scale = torch.ones(4, 1) if rank == 0 else torch.ones(1)
    model.weight = nn.Parameter(Scaled(torch.ones(4, 4, dtype=torch.int8), scale), requires_grad=False)
    return line(lambda: prepare(model, None, Plan(strategy="ddp")))


def test_ranks_whose_weights_hold_other_tensors_inside_are_one_line() -> None:
    for refused in run_ranks(of_other_sizes, num_ranks=2):
        assert "weight.scale [4, 1] torch.float32 | weight.scale [1] torch.float32" in refused
