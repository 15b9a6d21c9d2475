"""fp16 with matrices that are OWNED: their gradients are unscaled in slices, and an overflow is everyone's."""

import warnings
from typing import Any

import given_optimizers as own
import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call
from training import make_collectives
from whole import whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

NUM_STEPS = 5
PLANTED_STEP = 2
Told = tuple[list[float], dict[str, Tensor]]


def optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Muon beside AdamW, or one of each element that a plan gives owners."""
    if name == "adamw":
        return [adamw(model.parameters())]
    if name == "adamw fused":
        return [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [own.muon(model.parameters()), torch.optim.AdamW(others, lr=1e-2)]


def loss_of(model: Any, batch: Any, *, planted: bool) -> Tensor:
    """An overflow really happens: one rank's loss is scaled past what fp16 holds."""
    return cross_entropy(model, batch) * (1e30 if planted else 1.0)


def update(model: nn.Module, made: list[torch.optim.Optimizer], scaler: Any) -> None:
    for optimizer in made:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in made:
        optimizer.zero_grad()


@own.tried_soon
def on_ranks(rank: int, strategy: str, name: str, planted_rank: int | None, later: bool = False) -> Told:
    torch.manual_seed(1234)
    model, batch = MODELS["gpt"]()
    made = [] if later else optimizers(model, name)
    owned = ("blocks.*.weight",) if name.startswith("adamw") else ()
    plan = Plan(strategy=strategy, precision="fp16", bucket_bytes=4000, owned=owned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardwise.prepare(model, made, plan, collectives=make_collectives(late=True, rank=rank))
    made = made or optimizers(model, name)
    scaler = shardwise.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(NUM_STEPS):
        planted = rank == planted_rank and step == PLANTED_STEP
        scaler.scale(loss_of(model, batch(step, rank), planted=planted)).backward()
        if step % 2:
            for optimizer in made:
                scaler.unscale_(optimizer)
        update(model, made, scaler)
        scales.append(scaler.get_scale())
    assert engine_of(model).core.followed.plan.owned
    return scales, {key: value.clone() for key, value in model.state_dict().items()}


def in_one_process(rank: int, num_ranks: int, name: str, planted_rank: int | None) -> Told:
    """fp32 weights, computed with in fp16; the ranks' gradients are added up in fp32. torch's own scaler."""
    torch.manual_seed(1234)
    model, batch = MODELS["gpt"]()
    made = optimizers(model, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for index in range(num_ranks):
            model.zero_grad()
            halves = {key: p.half() for key, p in model.named_parameters()}
            planted = index == planted_rank and step == PLANTED_STEP
            loss = loss_of(
                lambda x, halves=halves: functional_call(model, halves, x), batch(step, index), planted=planted
            )
            scaler.scale(loss).backward()
            for key, p in model.named_parameters():
                sums[key] = sums[key] + p.grad if key in sums else p.grad.clone()
        for key, p in model.named_parameters():
            p.grad = sums[key] * (1 / num_ranks)
        update(model, made, scaler)
        scales.append(scaler.get_scale())
    return scales, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["muon", *whole("adamw", "adamw fused")])
@pytest.mark.parametrize("planted_rank", [None, 1], ids=["", "overflow"])
def test_scaled_gradients_of_whole_matrices_give_the_bits_of_one_process(name: str, planted_rank: int | None) -> None:
    ((scales, expected),) = run_ranks(in_one_process, num_ranks=1, args=(2, name, planted_rank))
    assert (scales[-1] < scales[0]) == (planted_rank is not None)
    for strategy in ("zero1", "zero2", "fsdp"):
        for found_scales, found in run_ranks(on_ranks, num_ranks=2, args=(strategy, name, planted_rank)):
            assert found_scales == scales
            for key, value in expected.items():
                assert torch.equal(found[key], value), f"{strategy}: {key}"


@pytest.mark.whole
def test_an_overflow_on_one_of_three_ranks_makes_all_skip_the_step() -> None:
    for scales, _ in run_ranks(on_ranks, num_ranks=3, args=("fsdp", "muon", 2)):
        assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9]


@pytest.mark.parametrize("strategy", ["fsdp", *whole("zero1", "zero2")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_scaler_recognises_an_optimizer_that_was_made_after_prepare(strategy: str) -> None:
    ((scales, expected),) = run_ranks(in_one_process, num_ranks=1, args=(2, "muon", None))
    for found_scales, found in run_ranks(on_ranks, num_ranks=2, args=(strategy, "muon", None, True)):
        assert found_scales == scales
        assert all(torch.equal(found[key], value) for key, value in expected.items())
