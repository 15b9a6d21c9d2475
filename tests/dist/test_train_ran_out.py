"""A run of `shardwise train` that is out of memory ends clearly, and its next start resumes under a smaller plan."""

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

from shardwise.base.errors import ShardwiseError
from shardwise.comm.groups.rank_progress import PROGRESS
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig
from shardwise.training.rank_run import train

NUM_STEPS = 4
NEVER = 0


def runs_out(rank: int, asked: TrainConfig, where: str, step: int) -> list[str]:
    """All ranks run out in this step; the notes of the error, or what was said where the run did not come to it."""

    def full(*_: Any) -> None:
        if PROGRESS.step == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def after_linear(module: nn.Module, inputs: Any, output: Any) -> None:
        # Not where the planner traces the model.
        if isinstance(module, nn.Linear) and type(output) is torch.Tensor:
            full()

    if where == "forward":
        handle = register_module_forward_hook(after_linear)
    else:
        handle = register_optimizer_step_pre_hook(full)
    console = Console(record=True, file=io.StringIO(), width=400)
    try:
        train(asked, console=console)
    except torch.OutOfMemoryError as error:
        return error.__notes__
    except ShardwiseError as error:
        return [str(error)]
    finally:
        handle.remove()
    return [console.export_text()]


def asked_for(folder: Path, plan: dict[str, Any], **sections: Any) -> TrainConfig:
    given = {"train": {"steps": NUM_STEPS, "survive": 1}, "checkpoint": {"every": 2}, **sections}
    return config(folder, plan={"micro_batch": 2, "accumulate": 2, **plan}, **given)


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        ({"strategy": "ddp"}, "forward"),
        ({"strategy": "auto"}, "update"),
        *whole(({"strategy": "fsdp"}, "forward"), ({"strategy": "zero1"}, "update")),
    ],
)
def test_the_next_start_resumes_from_the_newest_state_under_a_smaller_plan(
    plan: Any, where: str, tmp_path: Path
) -> None:
    folder, other = tmp_path / "one", tmp_path / "other"
    asked = asked_for(folder, plan)
    for rank, notes in enumerate(run_ranks(runs_out, num_ranks=2, args=(asked, where, 4))):
        assert any(f"rank {rank} ran out of memory in step 4, " in note for note in notes)
        assert any("held then: params" in note for note in notes)
        assert notes[-2:] == ["during step 4", "  the next start resumes under a smaller plan, from the newest state"]
    larger = Plan.load(folder / "plan.toml")
    said, _ = run_ranks(runs_out, num_ranks=2, args=(asked, where, NEVER))
    assert "ran out of memory in step 4, " in said[0]
    assert "; since then " in said[0]
    assert "× the memory" in said[0]
    smaller = Plan.load(folder / "plan.toml")
    assert smaller != larger
    assert json.loads((folder / "auto.json").read_text())["plan"] == smaller.to_dict()
    # The steps after the checkpoint, by a run that was given that plan.
    run_ranks(trained, num_ranks=2, args=(asked_for(other, larger.to_dict()), 3))
    run_ranks(trained, num_ranks=2, args=(asked_for(other, smaller.to_dict()),))
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]
    assert_same_end(folder, other)


def test_it_happens_as_often_as_the_config_says(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, {"strategy": "ddp"})
    for left in (1, 0):
        for notes in run_ranks(runs_out, num_ranks=2, args=(asked, "forward", 1)):
            assert ("  the next start " in "\n".join(notes)) == bool(left)
            assert ("  needs less: plan." in "\n".join(notes)) != bool(left)
    assert "failed" not in json.loads((tmp_path / "auto.json").read_text())


# Nothing is left but to split a pass.
SMALLEST = {
    "strategy": "fsdp",
    "recompute": "full",
    "offload_activations": True,
    "offload_states": True,
    "offload_update": "host",
}


@pytest.mark.whole
def test_where_nothing_else_needs_less_a_pass_is_split_and_then_the_run_ends_in_one_line(tmp_path: Path) -> None:
    task = {"model": reference("noisy_gpt")}
    asked = asked_for(tmp_path, SMALLEST, task=task, train={"steps": NUM_STEPS, "survive": 9})
    seen = []
    for _ in range(5):
        said, _ = run_ranks(runs_out, num_ranks=2, args=(asked, "update", 1))
        if "needs less: take more devices" in said[0]:
            break
        seen.append(Plan.load(tmp_path / "plan.toml"))
    else:
        pytest.fail("it never ends")
    assert [plan.micro_batch for plan in seen][:2] == [2, 1]
    assert {plan.micro_batch * plan.accumulate for plan in seen if plan.micro_batch} == {4}
