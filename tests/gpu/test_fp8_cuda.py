"""fp8 products of the hardware: those that a CPU emulates; and steps with them, ordinary, compiled and as CUDA graphs."""

from typing import Any

import pytest
import torch
from graph_cases import deterministic
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.engine.fp8.linear import RowwiseLinear, TensorwiseLinear
from shardwise.engines import require_engine
from shardwise.models.make import build_model
from shardwise.models.shapes import LlamaShape
from shardwise.models.tasks import cross_entropy

_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HAS_FP8, reason="needs a CUDA device with fp8")]

SHAPE = LlamaShape(
    num_layers=3, width=256, num_heads=4, num_kv_heads=2, ffn_width=512, vocab_size=512, max_seq=64, vocab_multiple=1
)
FP8 = {"precision": "fp8", "fp8_min_features": 64}


def outcome(kind: type[nn.Linear], *, device: str, num_rows: int) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(128, 256).bfloat16()
    x = torch.randn(num_rows, 128).bfloat16()
    grad = torch.randn(num_rows, 256).bfloat16()
    layer, x = layer.to(device), x.to(device).requires_grad_()
    layer.__class__ = kind
    y = layer(x)
    y.backward(grad.to(device))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [one.detach().float().cpu() for one in (y, x.grad, layer.weight.grad)]


@pytest.mark.parametrize("kind", [TensorwiseLinear, RowwiseLinear])
@pytest.mark.parametrize("num_rows", [64, 37])
def test_the_hardware_computes_what_a_cpu_emulates(kind: type[nn.Linear], num_rows: int) -> None:
    """The same 8-bit operands; sums are in another order, and those of a forward lose low bits."""
    for here, there in zip(*(outcome(kind, device=one, num_rows=num_rows) for one in ("cuda", "cpu")), strict=True):
        assert (here - there).norm() <= 4e-3 * there.norm()


@pytest.mark.parametrize("kind", [TensorwiseLinear, RowwiseLinear])
@pytest.mark.parametrize(("value", "is_right"), [(torch.nan, torch.isnan), (torch.inf, torch.isnan)])
def test_a_value_that_is_not_finite_is_not_lost(kind: type[nn.Linear], value: float, is_right: Any) -> None:
    layer = nn.Linear(128, 256).bfloat16().cuda()
    layer.__class__ = kind
    x = torch.randn(32, 128, device="cuda").bfloat16()
    x[3, 5] = value
    assert is_right(layer(x)[3]).all()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.max_seq + 1), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def trained(plan: Plan, *, steps: int = 12) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses, weights, and how many calls of units were replays."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build_model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shardwise.prepare(model, optimizer, plan, device="cuda")

    def step(*one: Tensor) -> Tensor:
        loss = cross_entropy(model, one)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with deterministic():
        losses = [step(*batch(number)).item() for number in range(steps)]
    return losses, model.state_dict(), require_engine(model).replayed_calls()[1]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sharded_weights_in_fp8_give_the_bits_of_replicated_ones(recipe: str) -> None:
    _, expected, _ = trained(Plan(strategy="ddp", fp8_recipe=recipe, capture="off", **FP8))
    for strategy in ("fsdp", "zero2"):
        _, found, _ = trained(Plan(strategy=strategy, fp8_recipe=recipe, capture="off", **FP8))
        assert all(torch.equal(found[name], value) for name, value in expected.items()), strategy


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_units_as_graphs_have_the_bits_of_ordinary_ones(recompute: str) -> None:
    ordinary, expected, _ = trained(Plan(capture="off", recompute=recompute, **FP8))
    losses, found, num_replayed = trained(Plan(recompute=recompute, **FP8))
    assert num_replayed > 0
    assert losses == ordinary
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_units_train_as_eager_ones_do_and_as_graphs_alike(recipe: str) -> None:
    plan = {"fp8_recipe": recipe, **FP8}
    eager, _, _ = trained(Plan(capture="off", **plan))
    compiled, expected, _ = trained(Plan(capture="off", compile="inductor", **plan))
    assert compiled == pytest.approx(eager, rel=2e-2)
    losses, found, num_replayed = trained(Plan(compile="inductor", **plan))
    assert num_replayed > 0
    assert losses == compiled
    assert all(torch.equal(found[name], value) for name, value in expected.items())
