"""Gradients by name: norms and a bound for each element, under every strategy and on torch's engine; closures."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from cases import GPT, adamw, make_tokens
from ranks import preload, run_ranks
from torch import Tensor, nn
from training import line, make_collectives
from whole import strategies, whole

import shardwise
from shardwise.doors.integrations.prepared_models import PreparedModels
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

preload("lightning.pytorch")

PLANS = [
    *(Plan(strategy=strategy) for strategy in STRATEGIES),
    Plan(strategy="fsdp", overrides={"blocks.1": "ddp"}),
    Plan(strategy="fsdp", engine="torch"),
    Plan(strategy="ddp", engine="torch"),
]


def prepared(plan: Plan, *, rank: int, optimizer: Any = adamw) -> Any:
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    model.blocks[0].norm1.requires_grad_(False)
    own = plan.engine == "shardwise"
    collectives = make_collectives(late=True, rank=rank) if own else None
    return *shardwise.prepare(model, optimizer(model.parameters()), plan, collectives=collectives), batch


def gradients(batch: Any) -> dict[str, Tensor]:
    """Of two ranks' batches, in one process."""
    torch.manual_seed(3)
    model, _ = make_tokens(GPT)
    model.blocks[0].norm1.requires_grad_(False)
    for rank in range(2):
        (cross_entropy(model, batch(0, rank)) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norms(rank: int, plans: list[Plan]) -> None:
    for plan in plans:
        model, _, batch = prepared(plan, rank=rank)
        expected = gradients(batch)
        assert shardwise.grad_norms(model) == {}
        cross_entropy(model, batch(0, rank)).backward()
        for norm_type in (2.0, 1.0, float("inf")):
            found = shardwise.grad_norms(model, norm_type=norm_type)
            assert list(found) == list(expected), plan
            for name, grad in expected.items():
                norm = torch.linalg.vector_norm(grad.double(), norm_type).item()
                assert found[name] == pytest.approx(norm, rel=1e-4), (plan, name)
        bound = 0.5 * max(shardwise.grad_norms(model, norm_type=float("inf")).values())
        shardwise.clip_grad_value_(model, bound)
        largest = shardwise.grad_norms(model, norm_type=float("inf"))
        assert max(largest.values()) == pytest.approx(bound)
        for name, grad in expected.items():
            norm = grad.clamp(-bound, bound).double().norm().item()
            assert shardwise.grad_norms(model)[name] == pytest.approx(norm, rel=1e-4), (plan, name)


def test_norms_by_name_and_clipped_values_are_those_of_one_process() -> None:
    run_ranks(norms, num_ranks=2, args=(PLANS,))


def clips_some(rank: int, plans: list[Plan]) -> None:
    """The gradient of one block, and then of one network's half by torch's own function where it can see it."""
    for plan in plans:
        model, _, batch = prepared(plan, rank=rank)
        expected = gradients(batch)
        cross_entropy(model, batch(0, rank)).backward()
        before = shardwise.grad_norms(model)
        some = [name for name in expected if name.startswith("blocks.1")]
        bare = getattr(model, "module", model)
        total = torch.stack([expected[name].double().norm() for name in some]).norm()
        found = shardwise.clip_grad_norm_(model, total.item() / 2, parameters=bare.blocks[1].parameters())
        assert found.item() == pytest.approx(total.item(), rel=1e-5), plan
        for name, norm in shardwise.grad_norms(model).items():
            assert norm == pytest.approx(before[name] / (2 if name in some else 1), rel=1e-5), (plan, name)
        shardwise.clip_grad_value_(model, 1e-9, parameters=[bare.blocks[1].norm1.weight])
        after = shardwise.grad_norms(model, norm_type=float("inf"))
        assert sum(norm <= 1.1e-9 for norm in after.values()) == 1
        assert "is not the model's" in line(
            lambda model=model: shardwise.clip_grad_norm_(model, 1.0, parameters=[nn.Parameter(torch.ones(3))])
        )
        if plan.strategy in ("ddp", "zero1") and plan.engine == "shardwise":
            torch.nn.utils.clip_grad_norm_(bare.blocks[0].parameters(), 1e-6)
            left = shardwise.grad_norms(model)
            clipped = [norm for name, norm in left.items() if name.startswith("blocks.0")]
            assert sum(norm**2 for norm in clipped) ** 0.5 == pytest.approx(1e-6, rel=0.1)
            assert left["blocks.1.norm2.weight"] == pytest.approx(before["blocks.1.norm2.weight"] / 2, rel=1e-5)


def test_only_the_parameters_that_were_named_are_clipped_and_by_their_norm() -> None:
    run_ranks(clips_some, num_ranks=2, args=(PLANS,))


def clips_slices(rank: int, strategy: str) -> str:
    model, optimizer, batch = prepared(Plan(strategy=strategy), rank=rank)
    cross_entropy(model, batch(0, rank)).backward()
    slices = [p for group in optimizer.param_groups for p in group["params"]]
    before = {p: p.grad.clone() for p in slices if p.grad is not None}
    said = line(lambda: torch.nn.utils.clip_grad_norm_(slices, 1e-3))
    assert all(torch.equal(p.grad, grad) for p, grad in before.items())
    return said


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_torchs_clipping_of_slices_by_one_ranks_norm_is_refused(strategy: str) -> None:
    for said in run_ranks(clips_slices, num_ranks=2, args=(strategy,)):
        assert "each rank would clip by the norm of its own part; call shardwise.clip_grad_norm_(model" in said


def refused(rank: int, plan: Plan) -> list[str]:
    model, _, batch = prepared(plan, rank=rank)
    cross_entropy(model, batch(0, rank)).backward()
    said = [line(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1))]
    said.append(line(lambda: shardwise.clip_grad_value_(model, -1.0)))
    model.zero_grad()
    with shardwise.accumulate(model):
        cross_entropy(model, batch(0, rank)).backward()
        said.append(line(lambda: shardwise.grad_norms(model)))
    return said


@pytest.mark.parametrize(("strategy", "precision"), [("zero2", "fp32"), ("fsdp", "bf16")])
def test_torchs_own_on_gradients_that_it_cannot_see_names_ours(strategy: str, precision: str) -> None:
    for said in run_ranks(refused, num_ranks=2, args=(Plan(strategy=strategy, precision=precision),)):
        assert "clip_grad_value_ or grad_norms with the model" in said[0]
        assert said[1].startswith("clip_value = -1.0")
        assert said[2].startswith("grad_norms in the middle of an accumulation")


# optimizer.step(closure)


def steps(rank: int, plan: Plan, how: str) -> dict[str, Tensor]:
    """Two passes per step: by a closure, by a closure after a pass that is kept, or without."""
    model, optimizer, batch = prepared(plan, rank=rank)

    def passes(step: int, numbers: tuple[int, ...]) -> Tensor:
        for number in numbers:
            with shardwise.accumulate(model, enabled=number == 0):
                loss = cross_entropy(model, batch(2 * step + number, rank))
                loss.backward()
        return loss

    for step in range(3):
        optimizer.zero_grad()
        if how == "plain":
            passes(step, (0, 1))
            optimizer.step()
        elif how == "closure":
            assert isinstance(optimizer.step(lambda step=step: passes(step, (0, 1))), Tensor)
        else:
            passes(step, (0,))
            optimizer.step(closure=lambda step=step: passes(step, (1,)))
    return model.state_dict()


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_step_with_a_closure_is_the_step_without_also_in_an_accumulation(strategy: str) -> None:
    plan = Plan(strategy=strategy)
    expected = run_ranks(steps, num_ranks=2, args=(plan, "plain"))[0]
    for how in ("closure", "half"):
        for weights in run_ranks(steps, num_ranks=2, args=(plan, how)):
            assert all(torch.equal(weights[name], expected[name]) for name in expected), how


class IgnoresClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def half_a_step(rank: int) -> list[str]:
    model, optimizer, batch = prepared(Plan(strategy="zero2"), rank=rank)

    def kept() -> None:
        with shardwise.accumulate(model):
            cross_entropy(model, batch(0, rank)).backward()

    said = [line(lambda: optimizer.step(kept))]
    optimizer.zero_grad()
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    model, optimizer, batch = prepared(
        Plan(strategy="ddp"), rank=rank, optimizer=lambda parameters: IgnoresClosure(parameters, lr=0.1)
    )
    said.append(line(lambda: optimizer.step(kept)))
    return said


def test_a_closure_whose_gradients_are_not_reduced_or_that_is_not_called_is_refused() -> None:
    for said in run_ranks(half_a_step, num_ranks=2):
        assert "not reduced yet" in said[0]
        assert "did not call the closure" in said[1]


def late_optimizer(rank: int) -> dict[str, Tensor]:
    """An optimizer that `prepare` did not see, whose first step has a closure."""
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    shardwise.prepare(model, None, Plan(strategy="zero1"))
    optimizer = adamw(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, batch(0, rank))
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.state_dict()


def one_step(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy="zero1"))
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    return model.state_dict()


def test_an_optimizer_that_is_made_later_may_begin_with_a_closure() -> None:
    found, expected = (run_ranks(body, num_ranks=2)[0] for body in (late_optimizer, one_step))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Precision


def told(rank: int, precision: str) -> list[str]:
    import warnings

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardwise.prepare(model, None, Plan(precision=precision))
    return [str(one.message) for one in caught if "parameters are" in str(one.message)]


def test_a_bf16_model_that_would_compute_in_fp32_is_told_once() -> None:
    said, others = run_ranks(told, num_ranks=2, args=("fp32",))
    assert said[0].startswith("2 of 4 parameters are bfloat16 (1.weight) and compute in fp32")
    assert "precision = 'bf16'" in said[0]
    assert (len(said), others) == (1, [])
    assert run_ranks(told, num_ranks=1, args=("bf16",)) == run_ranks(told, num_ranks=1, args=("native",)) == [[]]


# One optimizer of two, in Lightning


def clips_by_optimizer(rank: int, strategy: str) -> None:
    from lightning.fabric.plugins.environments import LightningEnvironment

    from shardwise.integrations import ShardwiseFabricStrategy, ShardwiseStrategy

    for kind in (ShardwiseFabricStrategy, ShardwiseStrategy):
        fabric: Any = kind(
            plan=strategy, parallel_devices=[torch.device("cpu")] * 2, cluster_environment=LightningEnvironment()
        )
        torch.manual_seed(3)
        model, batch = make_tokens(GPT)
        expected = {name: grad for name, grad in gradients(batch).items() if name.startswith("blocks.1")}
        total = torch.stack([grad.double().norm() for grad in expected.values()]).norm().item()
        model.blocks[0].norm1.requires_grad_(False)
        optimizers = [adamw(model.blocks[1].parameters()), adamw(model.blocks[0].parameters())]
        fabric._prepared = PreparedModels(Plan(strategy=strategy), device=lambda: torch.device("cpu"), choose="")
        fabric._prepared.prepare(model)
        for optimizer in optimizers:
            fabric._prepared.adopt(optimizer)
        cross_entropy(model, batch(0, rank)).backward()
        before = shardwise.grad_norms(model)
        if kind is ShardwiseFabricStrategy:
            found = fabric.clip_gradients_norm(model, optimizers[0], total / 2)
            assert found.item() == pytest.approx(total, rel=1e-5)
        else:
            fabric._lightning_module = model
            fabric.precision_plugin.clip_gradients(optimizers[0], total / 2)
        for name, norm in shardwise.grad_norms(model).items():
            assert norm == pytest.approx(before[name] / (2 if name in expected else 1), rel=1e-5), (kind, name)


@pytest.mark.parametrize("strategy", ["zero2", *whole("ddp", "fsdp")])
def test_lightnings_clipping_of_one_optimizer_leaves_the_other_one_alone(strategy: str) -> None:
    # Not imported here: it sets environment variables.
    if find_spec("lightning") is None:
        pytest.skip("needs lightning")
    run_ranks(clips_by_optimizer, num_ranks=2, args=(strategy,))
