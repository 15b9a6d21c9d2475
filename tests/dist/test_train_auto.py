"""`plan.strategy = "auto"` on two ranks: one plan for all, in the run folder, and the same one at the next start."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from rich.console import Console
from torch import nn
from train_tasks import config, lines, trained

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_section import InvalidConfig
from shardwise.training.rank_run import train


def auto(folder: Path, **sections: object) -> TrainConfig:
    plan = {"strategy": "auto", "precision": "fp32"}
    given = {"plan": plan, "auto": {"global_batch": 8}, **sections}
    return TrainConfig.from_dict(config(folder, plan={"micro_batch": 1}, train={"steps": 3}).to_dict() | given)


def refused(rank: int, asked: TrainConfig) -> str:
    try:
        train(asked)
    except ShardwiseError as error:
        return str(error)
    return ""


def test_ranks_train_the_plan_that_was_chosen_and_the_next_start_uses_it_again(tmp_path: Path) -> None:
    asked = auto(tmp_path / "run")
    run_ranks(trained, num_ranks=2, args=(asked,))
    plan = Plan.load(tmp_path / "run" / "plan.toml")
    assert not plan.is_auto
    assert plan.micro_batch is not None
    assert plan.micro_batch * plan.accumulate * 2 == 8
    kept = json.loads((tmp_path / "run" / "auto.json").read_text())
    assert kept["plan"] == plan.to_dict()
    assert kept["said"].startswith("ddp for all units")
    # Another plan for the same question: whoever solves it again would not come to it.
    kept["plan"] = {**kept["plan"], "strategy": "zero2"}
    (tmp_path / "run" / "auto.json").write_text(json.dumps(kept))
    steps = len(lines(tmp_path / "run"))
    longer = TrainConfig.from_dict(asked.to_dict() | {"train": {**asked.train.to_dict(), "steps": steps + 2}})
    run_ranks(trained, num_ranks=2, args=(longer,))
    assert Plan.load(tmp_path / "run" / "plan.toml").strategy == "zero2"
    assert len(lines(tmp_path / "run")) == steps + 2


def prepared(rank: int) -> str:
    try:
        shardwise.prepare(nn.Linear(2, 2), None, Plan(strategy="auto"))
    except ShardwiseError as error:
        return str(error)
    return ""


def test_prepare_says_how_an_auto_plan_is_chosen() -> None:
    assert all("not chosen yet; shardwise.Plan.auto(task, ...)" in said for said in run_ranks(prepared, num_ranks=2))


def test_a_budget_that_nothing_fits_is_told_on_every_rank(tmp_path: Path) -> None:
    asked = auto(tmp_path / "run", auto={"global_batch": 8, "budget": "1KiB"})
    one, other = run_ranks(refused, num_ranks=2, args=(asked,))
    assert "fits into 1.00 KiB per device" in one
    assert "rank 0 could not continue" in other
    assert not (tmp_path / "run" / "plan.toml").exists()


def test_a_step_without_a_number_of_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"needs auto\.global_batch or plan\.micro_batch"):
        auto(tmp_path, auto={})


def replanned(rank: int, asked: TrainConfig) -> None:
    train(asked, replan=True, console=Console(quiet=True))


def test_a_run_on_other_devices_resumes_under_a_plan_that_is_chosen_for_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fixed(num_steps: int) -> TrainConfig:
        return config(folder, plan={"strategy": "fsdp", "micro_batch": 2}, train={"steps": num_steps})

    run_ranks(trained, num_ranks=2, args=(fixed(2),))
    assert not (folder / "auto.json").exists()
    run_ranks(replanned, num_ranks=1, args=(fixed(4),))
    plan = Plan.load(folder / "plan.toml")
    # A step has as many samples as before, on one rank instead of two.
    assert plan.micro_batch is not None
    assert (plan.strategy, plan.micro_batch * plan.accumulate) == ("ddp", 4)
    assert [line["num_samples"] for line in lines(folder)] == [4] * 4
    # The next start goes on with it, as long as it asks the same.
    run_ranks(trained, num_ranks=1, args=(fixed(5),))
    assert Plan.load(folder / "plan.toml") == plan
    assert [line["num_samples"] for line in lines(folder)] == [4] * 5
    run_ranks(trained, num_ranks=2, args=(fixed(6),))
    assert Plan.load(folder / "plan.toml").strategy == "fsdp"
