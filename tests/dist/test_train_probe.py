"""Before an auto run trains, a step is rehearsed: without a trace, and with another plan if it needs too much memory."""

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
from train_tasks import assert_same_end, config, curve, lines, reference, tensors, trained

from shardwise.base.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig
from shardwise.training.rank_run import train

NUM_STEPS = 3


def asked_for(folder: Path, plan: dict[str, Any], **sections: Any) -> TrainConfig:
    given = {"train": {"steps": NUM_STEPS}, "task": {"model": reference("noisy_gpt")}, **sections}
    return config(folder, plan={"micro_batch": 2, "accumulate": 2, **plan}, **given)


def auto(folder: Path, *, budget: str = "1MiB", probe: bool = True, num_steps: int = NUM_STEPS) -> TrainConfig:
    plan = {"strategy": "auto", "precision": "fp32"}
    return asked_for(folder, plan, auto={"budget": budget, "probe": probe}, train={"steps": num_steps})


class Greedy:
    """Of the first block's linears, one holds more than it should in each pass, or has no memory left, once."""

    def __init__(self, *, num_bytes: int, fails: bool) -> None:
        self._num_bytes = num_bytes
        self._fails = fails
        self._held: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Not where the planner traces the model.
        if isinstance(module, nn.Linear) and torch.is_grad_enabled() and type(output) is torch.Tensor:
            if self._fails:
                self._fails = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self._held[:] = [torch.zeros(self._num_bytes, dtype=torch.uint8)] if self._num_bytes else []


def probed(rank: int, asked: TrainConfig, num_bytes: int = 0, fails: bool = False) -> str:
    """Rank 1 needs more memory than was predicted, or all ranks run out of it; what was said, also where it ends."""
    greedy = Greedy(num_bytes=num_bytes if rank == 1 else 0, fails=fails)
    handle = register_module_forward_hook(greedy)
    console = Console(record=True, file=io.StringIO(), width=400)
    try:
        train(asked, console=console)
    except ShardwiseError as error:
        return f"ended: {error}"
    except torch.OutOfMemoryError as error:
        return f"ended: {error.__notes__[-1].strip()}"
    finally:
        handle.remove()
    return console.export_text()


def test_a_run_that_was_rehearsed_is_bit_for_bit_the_run_that_was_not(tmp_path: Path) -> None:
    said, _ = run_ranks(probed, num_ranks=2, args=(auto(tmp_path / "with"),))
    assert said.count("Tried: ") == 1
    assert "solved again" not in said
    plan = Plan.load(tmp_path / "with" / "plan.toml")
    run_ranks(trained, num_ranks=2, args=(asked_for(tmp_path / "without", plan.to_dict()),))
    assert_same_end(tmp_path / "with", tmp_path / "without")
    record = json.loads((tmp_path / "with" / "auto.json").read_text())
    assert record["measured_bytes"] == pytest.approx(record["predicted_bytes"], rel=0.03)


@pytest.mark.whole
@pytest.mark.parametrize("model", ["noisy_gpt", "resnet"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_without_the_probe_the_run_is_the_same(model: str, precision: str, tmp_path: Path) -> None:
    for probe in (False, True):
        asked = asked_for(
            tmp_path / str(probe),
            {"strategy": "auto", "precision": precision},
            auto={"budget": "100MiB", "probe": probe},
            task={"model": reference(model)},
        )
        said, _ = run_ranks(probed, num_ranks=2, args=(asked,))
        assert ("Tried: " in said) is probe
    with_probe, without = tensors(tmp_path / "True"), tensors(tmp_path / "False")
    assert curve(tmp_path / "True") == curve(tmp_path / "False")
    assert without
    assert all(torch.equal(with_probe[name], value) for name, value in without.items())
    # Where every step was skipped (fp16), only the rehearsal has allocated the optimizer's state.
    assert not any(with_probe[name].any() for name in with_probe.keys() - without.keys())


def test_a_peak_above_the_prediction_on_one_rank_gives_all_ranks_the_same_smaller_plan(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    said, _ = run_ranks(probed, num_ranks=2, args=(auto(folder, budget="350KiB"), 60_000))
    rehearsed = [line for line in said.splitlines() if line.startswith("Tried: ")]
    assert len(rehearsed) == 2
    assert ": solved again for a budget of " in rehearsed[0]
    assert ": it is still the best plan for a budget of " in rehearsed[1]
    smaller = Plan.load(folder / "plan.toml")
    assert smaller.strategy != "ddp"
    assert json.loads((folder / "auto.json").read_text())["plan"] == smaller.to_dict()
    # The same training as under that plan from the start, and the next start neither solves nor rehearses again.
    run_ranks(trained, num_ranks=2, args=(asked_for(tmp_path / "other", smaller.to_dict()),))
    assert_same_end(folder, tmp_path / "other")
    said, _ = run_ranks(probed, num_ranks=2, args=(auto(folder, budget="350KiB", num_steps=NUM_STEPS + 1),))
    assert "Tried: " not in said
    assert Plan.load(folder / "plan.toml") == smaller
    assert len(lines(folder)) == NUM_STEPS + 1


def test_a_rehearsal_that_runs_out_gives_the_next_start_a_smaller_plan(tmp_path: Path) -> None:
    for said in run_ranks(probed, num_ranks=2, args=(auto(tmp_path / "one"), 0, True)):
        assert said == "ended: the next start resumes under a smaller plan, from the newest state"
    said, _ = run_ranks(probed, num_ranks=2, args=(auto(tmp_path / "one"), 60_000))
    assert "ran out of memory in step 1, forward" in said
    assert said.count("Tried: ") == 1
    # It does not go back to what ran out, though the budget would allow it.
    assert ": a larger plan ran out of memory, so this plan stays" in said
    smaller = Plan.load(tmp_path / "one" / "plan.toml")
    assert smaller.strategy != "ddp"
    run_ranks(trained, num_ranks=2, args=(asked_for(tmp_path / "other", smaller.to_dict()),))
    assert_same_end(tmp_path / "one", tmp_path / "other")


@pytest.mark.whole
def test_where_the_plan_cannot_change_a_peak_is_told(tmp_path: Path) -> None:
    # One rank owns the optimizer's state of each.
    plan = {"strategy": "auto", "precision": "fp32", "owned": ["blocks.*.weight"]}
    asked = asked_for(tmp_path, plan, auto={"budget": "220KiB"})
    said, _ = run_ranks(probed, num_ranks=2, args=(asked, 10_000))
    assert ": the plan stays, since it cannot change under a model with parameters that are OWNED" in said


@pytest.mark.whole
def test_a_peak_beyond_the_budget_that_no_plan_can_meet_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(probed, num_ranks=2, args=(auto(tmp_path / "run", budget="300KiB"), 400_000))
    assert one.startswith("ended: Tried: ")
    assert "fits into" in one
    assert "rank 0 could not continue: Tried: " in other


def test_a_step_that_updates_in_backward_cannot_be_undone_and_is_not_tried(tmp_path: Path) -> None:
    plan = {"strategy": "auto", "precision": "fp32", "update": "backward"}
    train = {"steps": NUM_STEPS, "clip_norm": 0}
    asked = asked_for(tmp_path, plan, auto={"budget": "1MiB"}, train=train)
    for said in run_ranks(probed, num_ranks=2, args=(asked,)):
        assert "Trying a step" not in said
        assert "ended" not in said
    assert len(lines(tmp_path)) == NUM_STEPS
