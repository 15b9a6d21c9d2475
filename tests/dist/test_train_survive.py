"""`shardwise train` outlives a rank that runs out of memory: in a pass without an end, in an update with a resume."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rich.console import Console
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from train_tasks import assert_same_end, config, lines, reference, trained
from whole import whole

from shardwise.plan import Plan
from shardwise.train.config import TrainConfig
from shardwise.train.rank_run import train

NUM_STEPS = 4


class Full:
    """Raises what a full device raises when it is called for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def runs_out(rank: int, asked: TrainConfig, at: int) -> str:
    """Rank 1 runs out in the forward of a linear of step 3: two blocks of four linears, two passes a step."""
    full = Full(at if rank == 1 else -1)
    handle = register_module_forward_hook(lambda module, *_: full() if isinstance(module, nn.Linear) else None)
    console = Console(record=True, file=io.StringIO(), width=400)
    try:
        train(asked, console=console)
    finally:
        handle.remove()
    assert full.left <= 0
    return console.export_text()


def asked_for(folder: Path, plan: dict[str, Any], **sections: Any) -> TrainConfig:
    given = {"train": {"steps": NUM_STEPS, "survive": 2}, "checkpoint": {"every": 2}, **sections}
    return config(folder, plan={"micro_batch": 2, "accumulate": 2, **plan}, **given)


@pytest.mark.parametrize("plan", [{"strategy": "ddp"}, *whole({"strategy": "fsdp"}, {"strategy": "auto"})])
def test_a_run_that_ran_out_is_the_run_that_was_resumed_under_the_smaller_plan(plan: Any, tmp_path: Path) -> None:
    said, _ = run_ranks(runs_out, num_ranks=2, args=(asked_for(tmp_path / "one", plan), 2 * 2 * 9 + 5))
    assert "rank 1 ran out of memory in step 3, forward" in said
    assert "the step is undone and runs again with" in said
    assert "× the memory" in said
    smaller = Plan.load(tmp_path / "one" / "plan.toml")
    assert json.loads((tmp_path / "one" / "auto.json").read_text())["plan"] == smaller.to_dict()
    # The same steps, of which the third and the fourth are taken by a run that resumes under that plan.
    other = tmp_path / "other"
    run_ranks(trained, num_ranks=2, args=(asked_for(other, plan), 3))
    asked = asked_for(other, smaller.to_dict())
    run_ranks(trained, num_ranks=2, args=(asked,))
    assert [line["step"] for line in lines(other)] == [1, 2, 3, 4]
    assert_same_end(tmp_path / "one", other)


# Nothing is left but to split a pass.
SMALLEST = {
    "strategy": "fsdp",
    "recompute": "full",
    "offload_activations": True,
    "offload_states": True,
    "offload_update": "host",
}


@pytest.mark.parametrize("length", [{"steps": NUM_STEPS}, *whole({"epochs": 1})])
def test_where_no_plan_needs_less_the_batch_is_split_as_if_it_had_been_accumulated_from_that_step_on(
    length: Any, tmp_path: Path
) -> None:
    def asked(folder: Path, plan: dict[str, Any]) -> TrainConfig:
        task = {"model": reference("noisy_gpt")}
        return asked_for(folder, plan, task=task, train={**length, "survive": 1})

    one, other = tmp_path / "one", tmp_path / "other"
    # Under full recompute a linear runs twice with gradients: in the forward of its pass, and in the backward.
    said, _ = run_ranks(runs_out, num_ranks=2, args=(asked(one, SMALLEST), 2 * 2 * 2 * 8 + 12))
    assert "rank 1 ran out of memory in step 3" in said
    assert "runs again with micro_batch = 1, accumulate = 4" in said
    assert "the same samples in 4 passes instead of 2; predicted" in said
    split = Plan.load(one / "plan.toml")
    assert (split.micro_batch, split.accumulate) == (1, 4)
    run_ranks(trained, num_ranks=2, args=(asked(other, SMALLEST), 3))
    run_ranks(trained, num_ranks=2, args=(asked(other, split.to_dict()),))
    written = lines(one)
    assert [line["num_samples"] for line in written[:NUM_STEPS]] == [8] * NUM_STEPS
    assert_same_end(one, other)


def full_update(rank: int, asked: TrainConfig, at: int) -> list[str]:
    full = Full(at)

    def before_step(*_: Any) -> None:
        with torch.enable_grad():
            full()

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        train(asked, console=Console(quiet=True))
    except torch.OutOfMemoryError as error:
        return error.__notes__
    finally:
        handle.remove()
    return []


@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        ("ddp", 3),
        *whole(*((strategy, at) for strategy in ("ddp", "zero1", "fsdp") for at in (1, 2, 4))),
    ],
)
def test_in_an_update_the_run_ends_clearly_and_the_next_start_resumes_under_a_smaller_plan(
    strategy: str, at: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    asked = asked_for(folder, {"strategy": strategy})
    for notes in run_ranks(full_update, num_ranks=2, args=(asked, at)):
        assert any("held then: params" in note for note in notes)
        assert any("rerun the same command to resume under it" in note for note in notes)
    smaller = Plan.load(folder / "plan.toml")
    assert smaller != asked.plan
    run_ranks(trained, num_ranks=2, args=(asked,))
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]
    assert Plan.load(folder / "plan.toml") == smaller
