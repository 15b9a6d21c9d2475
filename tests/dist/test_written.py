"""Writes outside of an update: into parameters, gradients and slices. Every copy follows, or the write is refused."""

from collections.abc import Callable, Iterable
from typing import Any

import given_optimizers
import pytest
import torch
from cases import MODELS, adamw, sgd
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from training import line, make_collectives
from whole import in_turn, whole

import shardwise
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

REPLICATED = ["ddp", "zero1", "zero2"]
IN_SLICES = ["zero1", "zero2"]
FREED = ["shard_grad_op", "fsdp"]

Write = Callable[[nn.Module, Optimizer], None]


def slices(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train(
    rank: int,
    plan: Plan,
    *,
    after_prepare: Write | None = None,
    before_step: Write | None = None,
    between: Write | None = None,
    make_optimizer: Callable[[Any], Optimizer] = adamw,
) -> dict[str, Tensor]:
    """Three steps under the late backend, with writes at three points; the weights at the end."""
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    optimizer = make_optimizer(model.parameters())
    collectives = make_collectives(late=True, rank=rank)
    shardwise.prepare(model, optimizer, plan, collectives=collectives, any_optimizer=True)
    if after_prepare is not None:
        after_prepare(model, optimizer)
    for step in range(3):
        cross_entropy(model, batch(step, rank)).backward()
        if before_step is not None:
            before_step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not different


# Into the module's parameters


@torch.no_grad()
def write_into_module(model: nn.Module, optimizer: Optimizer) -> None:
    first, second = model.blocks[0], model.blocks[1]
    nn.init.constant_(first.attention.qkv.bias, 0.25)
    first.norm1.weight.mul_(0.5)
    second.norm1.weight.data.mul_(0.5)
    second.norm2.bias[:3] = 2.0
    loaded = {name: torch.full(p.shape, 1 / 3) for name, p in second.norm2.named_parameters()}
    first.norm2.load_state_dict(loaded)


def write_by_state(model: nn.Module, optimizer: Optimizer) -> None:
    """The same, announced: in the values that a whole state holds."""
    state = model.state_dict()

    def put(name: str, change: Callable[[Tensor], Any]) -> None:
        before, after = state[name].bfloat16(), state[name].bfloat16()
        change(after)
        # An element that has the value already keeps the digits that bf16 does not show.
        state[name] = torch.where(after != before, after.float(), state[name])

    put("blocks.0.attention.qkv.bias", lambda value: value.fill_(0.25))
    put("blocks.0.norm1.weight", lambda value: value.mul_(0.5))
    put("blocks.1.norm1.weight", lambda value: value.mul_(0.5))
    put("blocks.1.norm2.bias", lambda value: value[:3].fill_(2.0))
    for name in ("blocks.0.norm2.weight", "blocks.0.norm2.bias"):
        # What is loaded arrives with all its digits.
        state[name].fill_(1 / 3)
    model.load_state_dict(state)


def written_in_bf16(rank: int, strategy: str, when: str) -> None:
    plan = Plan(strategy=strategy, precision="bf16")
    write: dict[str, Any] = {when: write_into_module}
    announced: dict[str, Any] = {when: write_by_state}
    assert_same(train(rank, plan, **write), train(rank, plan, **announced))


@pytest.mark.ledger("write-bf16", outcome="right")
@pytest.mark.ledger("write-bf16-init", outcome="right")
@pytest.mark.ledger("write-bf16-submodule", outcome="right")
@pytest.mark.parametrize(
    ("when", "strategy"),
    in_turn(["after_prepare", "before_step", "between"], "zero2", "zero1", "ddp", every=REPLICATED),
)
def test_what_is_written_into_bf16_parameters_is_trained_on(strategy: str, when: str) -> None:
    run_ranks(written_in_bf16, num_ranks=2, args=(strategy, when))


def read_in_bf16(rank: int, strategy: str) -> None:
    """A parameter that is only looked at keeps every digit of its master."""

    def look(model: nn.Module, optimizer: Optimizer) -> None:
        assert all(p.data.float().norm() >= 0 for p in model.parameters())
        assert all(p.data.norm() >= 0 for p in slices(optimizer))

    plan = Plan(strategy=strategy, precision="bf16")
    assert_same(train(rank, plan, between=look), train(rank, plan))


@pytest.mark.parametrize("strategy", ["zero2", *whole("ddp", "zero1")])
def test_reading_bf16_parameters_changes_nothing(strategy: str) -> None:
    run_ranks(read_in_bf16, num_ranks=2, args=(strategy,))


def state_after_a_write(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy, precision="bf16"))
    before = model.state_dict()
    model.blocks[0].norm1.weight.data.fill_(3.0)
    after = model.state_dict()
    assert after.pop("blocks.0.norm1.weight").eq(3.0).all()
    assert_same(after, before)


@pytest.mark.parametrize("strategy", ["zero1", *whole("ddp", "zero2")])
def test_a_state_dict_shows_what_was_written_into_bf16_parameters(strategy: str) -> None:
    run_ranks(state_after_a_write, num_ranks=2, args=(strategy,))


# Into gradients


def replaces_grads(rank: int) -> None:
    def halve(model: nn.Module, optimizer: Optimizer) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
        model.blocks[0].norm1.weight.grad = None

    expected = train(rank, Plan(strategy="ddp"), before_step=halve)
    assert_same(train(rank, Plan(strategy="zero1"), before_step=halve), expected)
    # A gradient that was given to a slice is no less true.
    torch.manual_seed(0)
    model, _ = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, sgd(model.parameters()), Plan(strategy="zero1"))
    before = model.state_dict()
    for parameter in slices(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.ledger("write-gradient", outcome="right", under=("ddp", "zero1"))
def test_gradients_that_are_replaced_under_zero1_count() -> None:
    run_ranks(replaces_grads, num_ranks=2)


# Into slices


@torch.no_grad()
def shrink(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.mul_(0.75)


def shrink_data(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.copy_(parameter.data * 0.75)


def shrink_module(model: nn.Module, optimizer: Optimizer) -> None:
    shrink(model.parameters())


def shrinks_slices(rank: int, strategy: str, precision: str) -> None:
    """Right as it is: where each value lies in one place, or everything is gathered before it is read."""
    plan = Plan(strategy=strategy, precision=precision)
    unsharded = Plan(strategy="ddp", precision=precision)

    def by_slices(model: nn.Module, optimizer: Optimizer) -> None:
        shrink(slices(optimizer))

    def by_data(model: nn.Module, optimizer: Optimizer) -> None:
        shrink_data(slices(optimizer))

    def edited(model: nn.Module, optimizer: Optimizer) -> None:
        with shardwise.edit(model):
            shrink_data(slices(optimizer))

    expected = train(rank, unsharded, before_step=by_slices)
    assert_same(train(rank, plan, before_step=by_slices), expected)
    assert_same(train(rank, plan, before_step=by_data), expected)
    expected = train(rank, unsharded, between=edited)
    if precision == "fp32":
        assert_same(train(rank, unsharded, between=shrink_module), expected)
    assert_same(train(rank, plan, between=edited), expected)
    if strategy in IN_SLICES:
        for write in (by_slices, by_data):
            said = line(lambda write=write: train(rank, plan, between=write))  # type: ignore[misc]
            assert "shardwise.edit" in said
            assert "optimizer.param_groups" in said
    else:
        assert_same(train(rank, plan, between=by_slices), expected)
        assert_same(train(rank, plan, between=by_data), expected)


@pytest.mark.ledger("write-slices", outcome="right")
@pytest.mark.ledger("write-ema", outcome="right")
@pytest.mark.parametrize(("precision", "strategy"), in_turn(["fp32", "bf16"], "ddp", "fsdp", every=["ddp", *FREED]))
def test_what_is_written_into_slices_reaches_every_rank(strategy: str, precision: str) -> None:
    run_ranks(shrinks_slices, num_ranks=2, args=(strategy, precision))


@pytest.mark.ledger("write-slices", outcome="refused")
@pytest.mark.parametrize(("precision", "strategy"), in_turn(["fp32", "bf16"], "zero2", "zero1", every=IN_SLICES))
def test_a_write_into_slices_that_other_ranks_do_not_know_of_is_refused(strategy: str, precision: str) -> None:
    run_ranks(shrinks_slices, num_ranks=2, args=(strategy, precision))


def evaluates_after_a_write(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    averages = [parameter.detach() * 0.5 for parameter in slices(optimizer)]
    for parameter, average in zip(slices(optimizer), averages, strict=True):
        parameter.data.copy_(average)
    with torch.no_grad():
        assert "shardwise.edit" in line(lambda: model(batch(0, rank)[0]))
    assert "shardwise.edit" in line(model.state_dict)


@pytest.mark.ledger("write-ema", outcome="refused")
@pytest.mark.parametrize("strategy", ["zero2", *whole("zero1")])
def test_evaluation_and_state_dict_after_an_unannounced_write_are_refused(strategy: str) -> None:
    run_ranks(evaluates_after_a_write, num_ranks=2, args=(strategy,))


def tears_out(rank: int, strategy: str) -> None:
    model, _ = MODELS["gpt"]()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    parameter = slices(optimizer)[0]

    def replace() -> None:
        parameter.data = torch.zeros_like(parameter)

    assert "p.copy_" in line(replace)
    assert "p.copy_" in line(lambda: nn.utils.vector_to_parameters(torch.zeros(parameter.numel()), [parameter]))


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("zero1", "shard_grad_op")])
def test_a_slice_cannot_be_given_other_memory(strategy: str) -> None:
    run_ranks(tears_out, num_ranks=2, args=(strategy,))


def offloads(rank: int, strategy: str) -> None:
    def between(model: nn.Module, optimizer: Optimizer) -> None:
        with shardwise.edit(model):
            shrink_data(slices(optimizer))

    def unannounced(model: nn.Module, optimizer: Optimizer) -> None:
        shrink_data(slices(optimizer))

    plan = Plan(strategy=strategy, precision="bf16", offload_states=True)
    expected = train(rank, Plan(strategy=strategy, precision="bf16"), between=between)
    assert_same(train(rank, plan, between=between), expected)
    if strategy in FREED:
        assert_same(train(rank, plan, between=unannounced), expected)


@pytest.mark.parametrize("strategy", ["fsdp", *whole("zero2")])
def test_slices_in_host_memory_can_be_written_as_well(strategy: str) -> None:
    run_ranks(offloads, num_ranks=2, args=(strategy,))


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers: `eval` puts averages in place of the parameters, `train` puts them back."""

    training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["average"] = (
                    parameter.clone() if "average" not in state else state["average"].lerp(parameter, 0.5)
                )

    @torch.no_grad()
    def eval(self) -> None:
        if self.training:
            for parameter, state in self.state.items():
                state["latest"] = parameter.clone()
                parameter.copy_(state["average"])
        self.training = False

    @torch.no_grad()
    def train(self) -> None:
        if not self.training:
            for parameter, state in self.state.items():
                parameter.copy_(state["latest"])
        self.training = True


def averaging(parameters: Any) -> Optimizer:
    return Averaging(parameters, lr=0.1)


def swaps(rank: int, strategy: str) -> None:
    def swap(model: Any, optimizer: Any) -> None:
        optimizer.eval()
        with torch.no_grad():
            losses.append(cross_entropy(model, MODELS["gpt"]()[1](9, rank)).item())
        optimizer.train()

    losses: list[float] = []
    expected = train(rank, Plan(strategy="ddp"), between=swap, make_optimizer=averaging)
    evaluated, losses = losses, []
    assert_same(train(rank, Plan(strategy=strategy), between=swap, make_optimizer=averaging), expected)
    assert losses == evaluated


@pytest.mark.ledger("write-schedule-free", outcome="right")
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("zero1", "shard_grad_op")])
def test_an_optimizer_that_swaps_values_for_evaluation_does_so_on_every_rank(strategy: str) -> None:
    run_ranks(swaps, num_ranks=2, args=(strategy,))


# A refusal changes nothing


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.norm(x))
        return out


def refused_loads(rank: int, plan: Plan) -> list[str]:
    """Load a part of the model, or a module around it; return what is said, once nothing has changed."""
    model = nn.Sequential(Normed(), Normed())
    optimizer = sgd(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    around = nn.ModuleDict({"model": model})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = []
    for module, prefix in ((model[0], "0."), (around, "")):
        state = {name.removeprefix(prefix): value + 1 for name, value in before.items() if name.startswith(prefix)}
        if module is around:
            state = {f"model.{name}": value for name, value in state.items()}
        said.append(line(lambda module=module, state=state: module.load_state_dict(state)))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
    model.load_state_dict({f"0.{name}": value + 1 for name, value in model[0].norm.named_buffers()}, strict=False)
    return said


@pytest.mark.parametrize("plan", [Plan(strategy=strategy, units="class:Normed") for strategy in FREED], ids=FREED)
def test_a_refused_load_of_a_part_of_the_model_leaves_its_buffers_as_they_were(plan: Plan) -> None:
    for part, around in run_ranks(refused_loads, num_ranks=2, args=(plan,)):
        assert part.startswith("load_state_dict of a Normed inside the model: norm.weight is sharded")
        assert around.startswith("load_state_dict of a module around the model: 0.norm.weight is")


def switches(rank: int, strategy: str | None) -> list[Any]:
    """Losses and weights in evaluation after 3 and 5 steps; without a strategy in one process, of two ranks' batches."""
    torch.manual_seed(3)
    model, batch = MODELS["gpt"]()
    optimizer = given_optimizers.Switched(model.parameters(), lr=0.1)
    if strategy is not None:
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    found: list[Any] = []
    for step in range(5):
        optimizer.train()
        if strategy is not None:
            cross_entropy(model, batch(step, rank)).backward()
        else:
            sums = [torch.zeros_like(p) for p in model.parameters()]
            for each in range(2):
                grads = torch.autograd.grad(cross_entropy(model, batch(step, each)), list(model.parameters()))
                sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total * 0.5
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 4):
            optimizer.eval()
            with torch.no_grad():
                found.append(cross_entropy(model, batch(9, 0)).item())
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp", "zero1", "shard_grad_op")])
def test_a_schedule_free_optimizer_trains_and_evaluates_as_in_one_process(strategy: str) -> None:
    (expected,) = run_ranks(switches, num_ranks=1, args=(None,))
    for found in run_ranks(switches, num_ranks=2, args=(strategy,)):
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, dict):
                assert all(torch.equal(one[name], value) for name, value in other.items())
            else:
                assert one == other


# Optimizers around another one, as docs/engine.md shows


def on_slices(model: Any, write: Callable[[Any], None], optimizer: Optimizer) -> None:
    with shardwise.edit(model), torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                write(parameter)


def wrapped(rank: int, strategy: str | None, kind: str) -> dict[str, Tensor]:
    """Four steps of SAM or Lookahead around SGD; without a strategy in one process, of two ranks' batches."""
    torch.manual_seed(3)
    model, batch = MODELS["gpt"]()
    optimizer = sgd(model.parameters())
    if strategy is not None:
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))

    def backward(step: int) -> None:
        for each in range(2) if strategy is None else [rank]:
            (cross_entropy(model, batch(step, each)) / (2 if strategy is None else 1)).backward()

    def write(change: Callable[[Any], None]) -> None:
        if strategy is not None:
            on_slices(model, change, optimizer)
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    change(parameter)

    kept: dict[Any, Tensor] = {}
    write(lambda p: kept.update({p: p.clone()}))
    for step in range(4):
        backward(step)
        if kind == "sam":
            if strategy is None:
                norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            else:
                norm = shardwise.clip_grad_norm_(model, float("inf"))
            scale = 0.05 / (norm.item() + 1e-12)
            write(lambda p: kept.update({p: p.clone()}))
            write(lambda p, scale=scale: p.add_(p.grad, alpha=scale) if p.grad is not None else None)
            optimizer.zero_grad()
            backward(step)
            write(lambda p: p.copy_(kept[p]))
        optimizer.step()
        optimizer.zero_grad()
        if kind == "lookahead" and step % 2:
            write(lambda p: p.copy_(kept[p].lerp_(p, 0.5)))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["sam", "lookahead"])
def test_sam_and_lookahead_around_a_prepared_optimizer_are_those_of_one_process(kind: str) -> None:
    (expected,) = run_ranks(wrapped, num_ranks=1, args=(None, kind))
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        for found in run_ranks(wrapped, num_ranks=2, args=(strategy, kind)):
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
