"""Half precision: what stays in fp32, and scaled gradients whose overflow is everyone's."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import MODELS, adamw, sgd
from ranks import run_ranks, shut_down
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training import Case, line, make_collectives, on_ranks
from whole import strategies, whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES


@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("gpt", "fp16"), *whole(("resnet", "bf16"))])
def test_strategies_are_bit_equal_in_half_precision(model: str, precision: str) -> None:
    case = Case(make=MODELS[model], optimizer=adamw, num_steps=3)
    expected = None
    for strategy in STRATEGIES:
        plan = Plan(strategy=strategy, precision=precision)
        for result in run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)):
            expected = expected or result.weights
            assert all(torch.equal(result.weights[name], weight) for name, weight in expected.items()), strategy


def frozen_block(rank: int, strategy: str) -> dict[str, Tensor]:
    model, batch = MODELS["gpt"]()
    model.get_submodule("blocks.1").requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _, optimizer = shardwise.prepare(model, sgd(trained), Plan(strategy=strategy, precision="bf16"))
    for step in range(2):
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_a_frozen_unit_trains_in_half_precision_under_every_strategy() -> None:
    """Its slices are updated by nobody, and what is whole of it stays as it is."""
    expected = run_ranks(frozen_block, num_ranks=2, args=("ddp",))[0]
    for strategy in STRATEGIES:
        for weights in run_ranks(frozen_block, num_ranks=2, args=(strategy,)):
            assert all(torch.equal(weights[name], weight) for name, weight in expected.items()), strategy


class Watched(nn.Module):
    """A norm and a head that tell the dtypes they compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(6), "linear": nn.Linear(6, 6)}) for _ in "ab")
        self.head = nn.Linear(6, 3)
        self.seen: dict[str, tuple[torch.dtype, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["linear"](self.watch("norm", block["norm"], x))
        return self.watch("head", self.head, x)

    def watch(self, name: str, module: Any, x: Tensor) -> Tensor:
        inside = []
        handle = module.register_forward_pre_hook(lambda module, inputs: inside.append(inputs[0].dtype))
        y = module(x)
        handle.remove()
        self.seen[name] = (x.dtype, *inside, module.weight.dtype, y.dtype)
        return y


def kept_in_fp32(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = Watched()
    plan = Plan(strategy=strategy, precision="bf16", keep_fp32=("*.norm", "head"), units="none")
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), plan)
    for _ in range(2):
        y = model(torch.ones(2, 6))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bf16, fp32 = torch.bfloat16, torch.float32
    # What comes in, what is computed with, the weight, what goes out.
    assert model.seen == {"norm": (bf16, fp32, fp32, bf16), "head": (bf16, fp32, fp32, bf16)}
    assert sorted(str(flat.full.buffer.dtype) for flat in engine_of(model).core.flats) == [
        "torch.bfloat16",
        "torch.float32",
    ]


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_modules_that_are_kept_in_fp32_compute_in_it_and_hand_on_the_plans_dtype(strategy: str) -> None:
    run_ranks(kept_in_fp32, num_ranks=2, args=(strategy,))


def native_dtypes(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5))
    model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    model[1].register_forward_hook(lambda module, inputs, output: output.float())
    before = [p.dtype for p in model.parameters()]
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), Plan(strategy=strategy, precision="native"))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert [p.dtype for p in model.parameters()] == before
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32, torch.float64}


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_native_leaves_every_dtype_alone(strategy: str) -> None:
    run_ranks(native_dtypes, num_ranks=2, args=(strategy,))


# Scaled gradients

PLANTED_STEP = 2


def scaled(rank: int, plan: Plan, planted_rank: int | None, fused: bool) -> list[tuple[float, float, int]]:
    """(scale, sum of the weights, optimizer steps taken) after each step; one rank's gradient is spoiled in one step."""
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    collectives = make_collectives(late=True, rank=rank) if plan.engine == "shardwise" else None
    model, optimizer = shardwise.prepare(model, optimizer, plan, collectives=collectives)
    scaler = shardwise.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    told = []
    for step in range(5):
        loss = cross_entropy(model, batch(step, rank))
        scaler.scale(loss).backward()
        if rank == planted_rank and step == PLANTED_STEP:
            spoil(optimizer)
        if step % 2:
            scaler.unscale_(optimizer)
            shardwise.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps = [int(state["step"]) for state in optimizer.state.values()]
        weights = sum(w.double().sum().item() for w in shardwise.full_state_dict(model)["model"].values())
        told.append((scaler.get_scale(), weights, max(steps, default=0)))
    return told


def spoil(optimizer: torch.optim.Optimizer) -> None:
    """An overflow in one element of what this rank alone holds."""
    grad = next(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = float("inf")


def check_scaled(told: list[list[tuple[float, float, int]]], *, planted: bool) -> None:
    assert all(other == told[0] for other in told), "the same scale, weights and steps on every rank"
    scales = [scale for scale, _, _ in told[0]]
    weights = [weight for _, weight, _ in told[0]]
    start = 2.0**12
    # The scale doubles after two good steps and is halved after a bad one, which changes no weight.
    assert scales == (
        [start, 2 * start, start, start, 2 * start] if planted else [start, 2 * start, 2 * start, 4 * start, 4 * start]
    )
    assert (weights[PLANTED_STEP] == weights[PLANTED_STEP - 1]) == planted
    assert told[0][-1][2] == (4 if planted else 5)


@pytest.mark.parametrize(
    ("strategy", "fused"),
    [("zero2", False), ("fsdp", True), *whole(("zero1", True), ("zero1", False), ("zero2", True), ("fsdp", False))],
)
def test_an_overflow_in_one_ranks_slice_makes_all_four_ranks_skip_the_step(strategy: str, fused: bool) -> None:
    plan = Plan(strategy=strategy, precision="fp16")
    check_scaled(run_ranks(scaled, num_ranks=4, args=(plan, 2, fused)), planted=True)


def test_without_overflow_the_scale_grows_on_all_ranks_alike() -> None:
    check_scaled(
        run_ranks(scaled, num_ranks=2, args=(Plan(strategy="fsdp", precision="fp16"), None, False)), planted=False
    )


def test_torchs_engine_may_be_scaled_the_same() -> None:
    shut_down()
    plan = Plan(strategy="fsdp", precision="fp16", engine="torch")
    check_scaled(run_ranks(scaled, num_ranks=2, args=(plan, 1, False)), planted=True)
    shut_down()


def overflowed_in_forward(rank: int, strategy: str) -> tuple[float, bool]:
    """An overflow that really happens: one rank's loss is scaled past what fp16 holds."""
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), Plan(strategy=strategy, precision="fp16"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = shardwise.GradScaler("cpu", init_scale=2.0**10)
    loss = cross_entropy(model, batch(0, rank)) * (1e30 if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return scaler.get_scale(), unchanged


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_gradient_that_overflows_on_one_of_four_ranks_is_skipped_by_all(strategy: str) -> None:
    assert run_ranks(overflowed_in_forward, num_ranks=4, args=(strategy,)) == [(2.0**9, True)] * 4


# Norms


def norms(rank: int, strategy: str) -> None:
    """Every kind of norm, and parameters of which a rank owns nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))
    x = torch.arange(4.0).view(2, 2)
    twin = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))
    twin.load_state_dict(model.state_dict())
    twin(x).square().sum().backward()
    shardwise.prepare(model, sgd(model.parameters()), Plan(strategy=strategy, units="none"))
    for norm_type in (2.0, float("inf"), 1.0, 3.0):
        model.zero_grad()
        model(x).square().sum().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()], norm_type)
        clip = partial(shardwise.clip_grad_norm_, model, norm_type=norm_type)
        torch.testing.assert_close(clip(float(expected) / 2), expected)
        torch.testing.assert_close(clip(1e9), expected / 2)


@pytest.mark.parametrize("strategy", strategies("ddp", "zero2", "fsdp"))
@pytest.mark.parametrize("num_ranks", [4, *whole(2)])
def test_every_norm_is_of_the_whole_gradient_also_where_a_rank_owns_nothing(strategy: str, num_ranks: int) -> None:
    run_ranks(norms, num_ranks=num_ranks, args=(strategy,))


def parametrised(rank: int, strategy: str, precision: str, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(getattr(parametrizations, kind)(nn.Linear(6, 6)) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, precision=precision, units="class:ParametrizedLinear"))
    for step in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(shardwise.full_state_dict(model)["model"])


@pytest.mark.parametrize("kind", ["spectral_norm", "orthogonal"])
def test_parametrizations_with_fp32_buffers_compute_in_fp32(kind: str) -> None:
    """A raw error of torch before: a bf16 weight times an fp32 vector."""
    expected, _ = run_ranks(parametrised, num_ranks=2, args=("ddp", "fp32", kind))
    found, other = run_ranks(parametrised, num_ranks=2, args=("fsdp", "bf16", kind))
    for name, value in expected.items():
        assert torch.equal(found[name], other[name])
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-2)


def old_spectral_norm(rank: int) -> None:
    def prepare(**options: Any) -> nn.Module:
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)))
        return shardwise.prepare(model, None, Plan(strategy="ddp", precision="bf16", **options))[0]

    assert "use torch.nn.utils.parametrizations.spectral_norm" in line(prepare)
    prepare(keep_fp32=("0",))(torch.ones(2, 6)).sum().backward()


def test_the_old_spectral_norm_is_refused_in_half_precision_unless_it_is_kept_in_fp32() -> None:
    run_ranks(old_spectral_norm, num_ranks=2)
