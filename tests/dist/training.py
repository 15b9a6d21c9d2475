"""Bodies of ranks that train, and what they are compared with: the same training in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from cases import Batch
from late import LateCollectives
from ranks import run_ranks
from torch import Tensor, nn

from reliability.said import say
from shardwise.base.errors import ShardwiseError
from shardwise.comm.groups.collectives import BackendCollectives, Collectives
from shardwise.engine.engine import engine_of
from shardwise.engines import clip_grad_norm_, prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: `make` returns a model and a function that makes one rank's batch of a step."""

    make: Callable[[], tuple[nn.Module, Callable[[int, int], Batch]]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    num_steps: int = 6
    double: bool = False
    max_norm: float | None = None
    set_to_none: bool = True
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training gave: the losses of each step's ranks, and the weights at the end.

    `at_start`: of each weight, the largest value that it began with. Only one process notes it.
    """

    losses: list[list[float]]
    weights: dict[str, Tensor]
    at_start: dict[str, float] = field(default_factory=dict)


def build(case: Case) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    torch.manual_seed(1234)
    model, batch = case.make()
    if case.double:
        model = model.double()
    return model, batch


def to_double(batch: Batch, case: Case) -> Batch:
    def double(value: Any) -> Any:
        return value.double() if case.double and isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(double, batch))  # type: ignore[return-value]


@cache
def one_process(case: Case, *, num_ranks: int) -> Result:
    """What one process gives for the micro-batches of `num_ranks` ranks.

    It runs in a process of the pool, with as many threads as a rank has: matrix products differ in their last bits
    with the number of threads.
    """
    (result,) = run_ranks(_in_one_process, num_ranks=1, args=(case, num_ranks))
    return result


def _in_one_process(rank: int, case: Case, num_ranks: int) -> Result:
    """The ranks' micro-batches in rank order, their gradients summed and × 1/W."""
    model, batch = build(case)
    optimizer = case.optimizer(model.parameters())
    losses = []
    at_start = {name: _largest(parameter) for name, parameter in model.named_parameters()}
    for step in range(case.num_steps):
        sums: list[Tensor | None] = [None for _ in model.parameters()]
        step_losses = []
        for micro_batch in range(num_ranks):
            model.zero_grad()
            loss = case.loss(model, to_double(batch(step, micro_batch), case))
            loss.backward()
            step_losses.append(loss.item())
            for index, parameter in enumerate(model.parameters()):
                grad = parameter.grad
                if grad is not None:
                    before = sums[index]
                    sums[index] = grad.clone() if before is None else before + grad
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = None if total is None else total * (1 / num_ranks)
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_losses)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Result(losses=losses, weights=weights, at_start=at_start)


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def make_collectives(*, late: bool, rank: int, ring: bool = False) -> Collectives:
    inner: Collectives = BackendCollectives()
    if ring:
        from shardwise.comm.groups.ring import RingCollectives

        inner = RingCollectives()
    return LateCollectives(inner, seed=rank) if late else inner


def on_ranks(rank: int, case: Case, plan: Plan, late: bool, different_start: bool = False) -> Result:
    """The body of a rank."""
    model, batch = build(case)
    if different_start and rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    optimizer = case.optimizer(model.parameters())
    collectives = make_collectives(late=late, rank=rank, ring=plan.collectives == "ring")
    prepare(model, optimizer, plan, collectives=collectives)
    losses = []
    for step in range(case.num_steps):
        loss = case.loss(model, to_double(batch(step, rank), case))
        loss.backward()
        if case.max_norm is not None:
            clip_grad_norm_(model, case.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        losses.append([loss.item()])
    state = model.state_dict()
    weights = {name: state[name] for name, _ in model.named_parameters()}
    if isinstance(collectives, LateCollectives):
        engine_of(model).core.wait_gathers()
        collectives.assert_all_waited()
    return Result(losses=losses, weights=weights)


def model_units(model: nn.Module) -> Any:
    return engine_of(model).core.units.values()


def assert_equal(results: list[Result], expected: Result) -> None:
    """Bit for bit, on every rank."""
    for rank, result in enumerate(results):
        assert [step[0] for step in result.losses] == [step[rank] for step in expected.losses]
        for name, weight in expected.weights.items():
            assert torch.equal(result.weights[name], weight), f"rank {rank}: {name}"


def assert_close(results: list[Result], expected: Result, *, tolerance: float) -> None:
    """Within `tolerance` of each tensor's maximum, at the start or at the end, and the same bits on every rank.

    Where a step takes a weight from 0.04 to 0.004, what is rounded is 0.04.
    """
    for result in results:
        for name, weight in expected.weights.items():
            assert torch.equal(result.weights[name], results[0].weights[name]), f"{name} differs between ranks"
            if weight.numel():
                error = (result.weights[name] - weight).abs().max() / max(
                    _largest(weight), expected.at_start.get(name, 0.0)
                )
                assert error <= tolerance, f"{name}: {error}"


def line(action: Callable[[], Any]) -> str:
    """The message that an action ends in."""
    with pytest.raises(ShardwiseError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return say(message)
