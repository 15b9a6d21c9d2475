"""A rank that runs out of memory in a step: it is undone on all ranks, and runs again under a plan that needs less."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from running_out import Point
from surviving_run import NUM_STEPS, Run, expected, points_of, survived
from test_replan import differences
from torch import Tensor, nn
from training import line
from whole import whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan


@pytest.mark.parametrize(
    ("num_ranks", "name", "optimizer", "plan", "seed"),
    [
        (2, "gpt", "groups", Plan(strategy="ddp"), 0),
        (2, "resnet", "adamw fused", Plan(strategy="shard_grad_op"), 1),
        *whole(
            *(
                (num_ranks, name, "groups", Plan(strategy=strategy, precision=precision), 10 * num_ranks + seed)
                for num_ranks in (2, 4)
                for seed, (name, strategy, precision) in enumerate(
                    (
                        ("gpt", "zero1", "bf16"),
                        ("gpt", "zero2", "fp32"),
                        ("gpt", "fsdp", "fp16"),
                        ("resnet", "ddp", "fp32"),
                        ("resnet", "zero1", "fp32"),
                        ("gpt", "shard_grad_op", "fp32"),
                        ("gpt", "ddp", "bf16"),
                        ("resnet", "fsdp", "bf16"),
                    )
                )
            ),
            (1, "gpt", "sgd", Plan(strategy="ddp"), 40),
        ),
    ],
)
def test_the_step_runs_again_as_if_it_had_begun_under_the_smaller_plan(
    num_ranks: int, name: str, optimizer: str, plan: Plan, seed: int
) -> None:
    points = points_of(seed, num_ranks=num_ranks)
    found = run_ranks(survived, num_ranks=num_ranks, args=(name, optimizer, plan, points))
    plans, said, _ = found[0]
    assert len(said) == 3
    assert len(set(map(str, [plan, *plans]))) == 4
    alone = run_ranks(expected, num_ranks=num_ranks, args=(name, optimizer, plan, plans))
    for rank, (_, _, result) in enumerate(found):
        assert differences(result, alone[rank]) == []


def test_units_move_to_host_memory_as_few_as_are_needed() -> None:
    plan = Plan(recompute="full")
    points = [Point(rank=1, step=step, number=1, place=0.6, phase="backward") for step in (1, 3, 4)]
    found = run_ranks(survived, num_ranks=2, args=("gpt", "adamw fused", plan, points))
    plans, said, _ = found[0]
    assert [plan.offload_states for plan in plans] == [False] * 3 + [("blocks.2",)] + [("blocks.1", "blocks.2")] * 2
    assert [plan.offload_activations for plan in plans] == [False] + [True] * 5
    assert "offload_states = ['blocks.2']" in said[1]
    alone = run_ranks(expected, num_ranks=2, args=("gpt", "adamw fused", plan, plans))
    for rank, (_, _, result) in enumerate(found):
        assert differences(result, alone[rank]) == []


def first_step(rank: int, points: list[Point]) -> Any:
    run = Run("gpt", "groups", Plan(), points, rank=rank)
    losses = [run.take(step) for step in range(3)]
    assert not run.out.left
    return losses, run.result(), engine_of(run.model).plan


def test_a_first_step_in_which_all_ranks_run_out_is_learned_again() -> None:
    points = [Point(rank=rank, step=0, number=0, place=0.3, phase="forward") for rank in range(2)]
    points.append(Point(rank=1, step=0, number=0, place=0.8, phase="backward"))
    found = run_ranks(first_step, num_ranks=2, args=(points,))
    plan = found[0][2]
    alone = run_ranks(expected, num_ranks=2, args=("gpt", "groups", Plan(), [plan] * NUM_STEPS))
    for rank, (losses, _, _) in enumerate(found):
        assert losses == alone[rank][0][:3]


def gradients_before(rank: int, fails: bool) -> Any:
    """A step on top of gradients that are there: reduced ones, and those of an accumulation."""
    points = [Point(rank=1, step=step, number=1, place=0.6, phase="backward") for step in (0, 1)] if fails else []
    run = Run("gpt", "groups", Plan(strategy="zero1"), points, rank=rank, survive=2)
    losses = []
    for step in range(2):
        with shardwise.accumulate(run.model, enabled=step == 1):
            run.loss(run.model, (*run.batch(90 + step, rank), (9, 9))).backward()
        losses.append(run.take(step))
    return losses, run.result()


def test_gradients_of_before_the_step_are_as_they_were() -> None:
    alone = run_ranks(gradients_before, num_ranks=2, args=(False,))
    for rank, found in enumerate(run_ranks(gradients_before, num_ranks=2, args=(True,))):
        assert differences(found, alone[rank]) == []


def too_often(rank: int, most: int, plan: Plan) -> str:
    points = [Point(rank=0, step=0, number=0, place=place, phase="forward") for place in (0.2, 0.4, 0.6, 0.8)]
    run = Run("gpt", "groups", plan, points, rank=rank, survive=most)
    return line(lambda: run.take(0))


def test_it_ends_in_one_line_on_all_ranks_if_it_happens_too_often_or_no_plan_needs_less() -> None:
    for said in run_ranks(too_often, num_ranks=2, args=(1, Plan())):
        assert "rank 0 ran out of memory in step 1, forward" in said
        assert "more than 1 times" in said
    smallest = Plan(recompute="full", offload_activations=True, offload_states=True)
    for said in run_ranks(too_often, num_ranks=2, args=(3, smallest)):
        assert "there is no plan that needs less memory" in said


def with_own_collectives(rank: int) -> list[str]:
    points = [Point(rank=rank, step=2, number=0, place=0.5, phase="forward") for rank in range(2)]
    run = Run("gpt", "groups", Plan(), points, rank=rank)
    own = run.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return own(model, batch) / shardwise.mean_count(model, 1)

    step = shardwise.step(run.model, run.optimizer, loss, survive=3)
    run.step = step
    for number in range(2):
        run.take(number)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.take(2)
    return caught.value.__notes__


def test_a_step_with_collectives_of_its_own_is_not_survived_and_says_so() -> None:
    for notes in run_ranks(with_own_collectives, num_ranks=2):
        assert any("held then: params" in note for note in notes)
        assert any("its passes have collectives of their own" in note for note in notes)


def allocated(rank: int) -> None:
    # Under bf16 the statistics' scales stay in fp32, where the optimizer steps the module's own parameters.
    kept_fp32 = ("resnet", "groups", Plan(strategy="ddp", precision="bf16"))
    owned = ("gpt", "groups", Plan(owned=("blocks.*.weight",)))
    fsdp = [("gpt", name, Plan()) for name in ("groups", "adamw fused", "adam foreach", "rmsprop")]
    for model, name, plan in (*fsdp, kept_fp32, owned):
        run = Run(model, name, plan, [], rank=rank)
        for group in run.optimizer.param_groups:
            assert all(run.optimizer.state[parameter] for parameter in group["params"])
        if plan.owned:
            assert run.take(0) > 0


def test_optimizer_state_is_there_before_the_first_step() -> None:
    run_ranks(allocated, num_ranks=2)
