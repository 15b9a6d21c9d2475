"""`train`: every strategy learns; what it writes, shows and refuses."""

import json
import math
import tomllib
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rich.console import Console
from torch import nn
from train_tasks import Ended, config, curve, gpt, lines, reference, table, trained
from whole import in_turn, whole

from reliability.said import say
from shardwise.base.errors import ShardwiseError
from shardwise.models.tasks import Task
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.batches import Sharing
from shardwise.training.loop.evaluation import evaluate
from shardwise.training.rank_run import train


def run(asked: TrainConfig, *, num_ranks: int = 2) -> list[Ended]:
    return run_ranks(trained, num_ranks=num_ranks, args=(asked,), timeout_seconds=110)


def accuracy(ended: list[Ended]) -> float:
    last = ended[0].seen[-1]
    assert last.evaluation is not None
    assert last.evaluation == ended[1].seen[-1].evaluation, "ranks disagree"
    return last.evaluation["accuracy"]


@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp", "zero1", "zero2", "shard_grad_op")])
def test_resnet_passes_95_percent_on_digits_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    asked = config(
        tmp_path,
        task={"model": "resnet-digits", "dataset": "digits"},
        plan={"strategy": strategy, "micro_batch": 32},
        optimizer={"lr": 3e-3},
        schedule={"warmup_steps": 5},
        train={"steps": 40, "eval_every": 40, "log_every": 20},
        checkpoint={"every": 0},
    )
    assert accuracy(run(asked)) > 0.95


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", *whole("fsdp")])
def test_a_vit_passes_95_percent_on_digits(tmp_path: Path, strategy: str) -> None:
    asked = config(
        tmp_path,
        task={"model": reference("vit")},
        plan={"strategy": strategy, "micro_batch": 32},
        optimizer={"lr": 5e-3, "weight_decay": 0.3},
        schedule={"warmup_steps": 10},
        train={"steps": 120, "eval_every": 120, "log_every": 40},
        checkpoint={"every": 0},
    )
    assert accuracy(run(asked)) > 0.95


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("llama-tiny", "fsdp"), *whole(("gpt-tiny", "fsdp"), ("gpt-tiny", "ddp"), ("llama-tiny", "ddp"))],
)
def test_the_loss_of_language_models_falls_on_stdlib(tmp_path: Path, model: str, strategy: str) -> None:
    """From ln 256 = 5.5, a guess, to about what bytes of Python give that are guessed by their frequency alone."""
    asked = config(
        tmp_path,
        task={"model": model, "dataset": "stdlib", "seq": 32},
        plan={"strategy": strategy, "micro_batch": 4},
        optimizer={"lr": 3e-3},
        schedule={"warmup_steps": 3},
        train={"steps": 20},
        checkpoint={"every": 0},
    )
    run(asked)
    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 3.8


def test_the_run_folder_says_what_was_run(tmp_path: Path) -> None:
    asked = config(tmp_path / "run", plan={"strategy": "zero2"}, train={"steps": 3})
    run(asked)
    assert TrainConfig.from_dict(tomllib.loads((tmp_path / "run" / "config.toml").read_text())) == asked
    assert Plan.load(tmp_path / "run" / "plan.toml") == asked.plan
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["num_ranks"] == 2


def test_metrics_have_a_line_for_each_step_and_on_step_sees_the_same_on_every_rank(tmp_path: Path) -> None:
    """With log_every = 3 steps are read by three; the evaluation of step 4 reads earlier."""
    ended = run(config(tmp_path, train={"steps": 8, "log_every": 3, "eval_every": 4}))
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(1, 9))
    assert [line["position"] for line in written] == list(range(4, 36, 4))
    assert [line["step"] for line in written if line["evaluation"]] == [4, 8]
    for rank in ended:
        assert [metrics.loss for metrics in rank.seen] == [line["loss"] for line in written]
    first = written[0]
    assert first["tokens_per_s"] == pytest.approx(8 * first["samples_per_s"])
    assert first["peak_of"] == "rss"
    assert 2**24 < first["peak_bytes"] < 2**36
    assert first["lr"] == 1e-2


def evaluated(rank: int, num_ranks: int, num_samples: int) -> dict[str, float]:
    task = table()
    assert task.evaluate is not None
    assert task.eval_dataset is not None
    sharing = Sharing(rank=rank, num_ranks=num_ranks, micro_batch=2, accumulate=1, num_samples=None)
    return evaluate(
        task.model,
        task.evaluate,
        task.eval_dataset,
        sharing=sharing,
        device=torch.device("cpu"),
        num_samples=num_samples,
    )


@pytest.mark.parametrize("num_samples", [1, 5, 15])
def test_evaluation_counts_each_sample_once_also_where_a_rank_has_none_left(num_samples: int) -> None:
    for result in run_ranks(evaluated, num_ranks=2, args=(2, num_samples)):
        assert result == {"index": (num_samples - 1) / 2}


def test_a_finished_run_has_nothing_left_to_do_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 3})
    run(asked)
    (again, _) = run(asked)
    assert again.seen == []
    more = replace(asked, train=replace(asked.train, steps=5))
    (longer, _) = run(more)
    assert [metrics.step for metrics in longer.seen] == [4, 5]


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [({"strategy": "zero1", "precision": "fp16"}, 5e-3), *whole(({"strategy": "ddp", "engine": "torch"}, 1e-5))],
    ids=["zero1 fp16", "ddp torch"],
)
def test_a_run_goes_on_under_another_plan_and_back(tmp_path: Path, plan: dict[str, Any], tolerance: float) -> None:
    path = tmp_path / "squares.txt"
    path.write_text("".join(f"The square of {number} is {number * number}.\n" for number in range(3000)))

    def asked(name: str, steps: int, **plan: Any) -> TrainConfig:
        # The same text on every machine: whether a gradient overflows in fp16, which skips a step, depends on it.
        task = {"model": "gpt-tiny", "dataset": f"text:{path}", "seq": 64}
        return config(tmp_path / name, task=task, plan=plan, train={"steps": steps}, schedule={"name": "constant"})

    run(asked("changed", 3))
    run(asked("changed", 6, **plan))
    run(asked("changed", 9))
    run(asked("same", 9))
    changed, same = ([loss for _, loss, _ in curve(tmp_path / name)] for name in ("changed", "same"))
    assert changed == pytest.approx(same, rel=tolerance)
    assert changed[-1] < 0.8 * changed[0]
    assert all(norm is not None and math.isfinite(norm) for _, _, norm in curve(tmp_path / "changed"))


def said(rank: int, asked: TrainConfig, fresh: bool) -> str:
    output = StringIO()
    train(asked, console=Console(file=output, width=300), fresh=fresh)
    return output.getvalue()


def test_rank_0_says_what_is_done_and_fresh_starts_from_step_0(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 2, "log_every": 2, "eval_every": 2})
    (first, other) = run_ranks(said, num_ranks=2, args=(asked, False))
    building, started, took, evaluating, *_ = first.splitlines()
    assert building.startswith("Building ")
    assert building.endswith(" and opening its data …")
    assert "fsdp on 2 × cpu, fp32: 2 steps of 4 samples" in started
    assert took.startswith("First step took ")
    assert evaluating.startswith("step 2/2  evaluating on ")
    assert other == ""
    changed = replace(asked, plan=replace(asked.plan, strategy="ddp"), train=replace(asked.train, steps=3))
    (second, _) = run_ranks(said, num_ranks=2, args=(changed, False))
    assert "Loading checkpoint step-00000002 …" in second
    assert "Resuming after step 2; plan.strategy: fsdp → ddp; train.steps: 2 → 3" in second
    (third, _) = run_ranks(said, num_ranks=2, args=(changed, False))
    assert "Nothing is left to do" in third
    (fourth, _) = run_ranks(said, num_ranks=2, args=(changed, True))
    assert "Resuming" not in fourth
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


@pytest.mark.whole
def test_compiled_units_train_the_same(tmp_path: Path) -> None:
    for name in ("none", "aot_eager"):
        run(config(tmp_path / name, plan={"compile": name}, train={"steps": 3}))
    assert curve(tmp_path / "none") == curve(tmp_path / "aot_eager")
    assert [line["compile_seconds"] is not None for line in lines(tmp_path / "aot_eager")] == [True, False, False]
    assert [line["compile_seconds"] for line in lines(tmp_path / "none")] == [None, None, None]


def deterministic(rank: int, asked: TrainConfig) -> tuple[bool, bool]:
    inside: list[bool] = []
    train(asked, on_step=lambda metrics: inside.append(torch.are_deterministic_algorithms_enabled()))
    return all(inside), torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode_holds_for_the_run_alone(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 2, "deterministic": True})
    assert run_ranks(deterministic, num_ranks=1, args=(asked,)) == [(True, False)]


def silent() -> Task:
    """A task that cannot be evaluated."""
    return replace(gpt(), evaluate=None)


def without_data() -> Task:
    return replace(gpt(), dataset=None)


def past_forward() -> Task:
    """A task whose loss does not call the model itself, whose root owns no parameters: nothing of it is gathered."""
    return replace(
        table(),
        model=nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=lambda model, indices: model.forward(indices[:, None].float()).mean(),
    )


def refused(rank: int, asked: TrainConfig) -> str:
    try:
        train(asked)
    except ShardwiseError as error:
        return str(error)
    return ""


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too few samples": (
        {"task": {"model": reference("table")}, "plan": {"micro_batch": 8}},
        "the dataset has 15 samples, fewer than one step takes: 2 ranks × plan.micro_batch 8 × plan.accumulate 1 = 16",
    ),
    "no evaluation": (
        {"task": {"model": f"python:{__file__}:silent"}, "train": {"eval_every": 5}},
        "train.eval_every = 5, but the task has no evaluate: leave it out",
    ),
    "no data": (
        {"task": {"model": f"python:{__file__}:without_data"}},
        "brings no dataset: set task.dataset",
    ),
    "nothing to compile": (
        {"plan": {"units": "none", "compile": "aot_eager"}},
        "only units inside it are compiled",
    ),
    "another mesh": (
        {"plan": {"mesh": {"replicate": 2, "shard": 2}}},
        "mesh 2×2 is 4 ranks, but the job has 2",
    ),
    "a file in the way": (
        {"run": {"folder": __file__}},
        "cannot be written (Not a directory)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_every_rank(tmp_path: Path, mistake: str) -> None:
    sections, message = MISTAKES[mistake]
    sections = {**sections, "train": {"steps": 3, **sections.get("train", {})}}
    for told in run_ranks(refused, num_ranks=2, args=(config(tmp_path, **sections),)):
        assert message in told
        assert "\n" not in told


@pytest.mark.ledger("task-past-forward", outcome="refused")
@pytest.mark.parametrize(
    ("num_ranks", "strategy"), in_turn([1, 2], "fsdp", "zero2", every=("ddp", "zero1", "zero2", "fsdp"))
)
def test_a_loss_that_does_not_call_the_model_itself_is_refused(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    asked = config(
        tmp_path,
        task={"model": f"python:{__file__}:past_forward"},
        plan={"strategy": strategy, "units": "class:Linear"},
        train={"steps": 3},
    )
    for told in run_ranks(refused, num_ranks=num_ranks, args=(asked,)):
        assert "a backward without a forward of the model" in say(told)
        assert "\n" not in told


def test_a_folder_of_another_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 2})
    run(asked)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = replace(asked, optimizer=replace(asked.optimizer, name="sgd"))
    for told in run_ranks(refused, num_ranks=2, args=(other,)):
        assert "holds a run with optimizer.name = 'adamw', this one has 'sgd'" in told
        assert "--run DIR" in told
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def given_different_configs(rank: int, one: TrainConfig, other: TrainConfig) -> str:
    return refused(rank, other if rank else one)


def test_ranks_with_different_configs_are_told(tmp_path: Path) -> None:
    one = config(tmp_path, train={"steps": 2})
    other = replace(one, optimizer=replace(one.optimizer, lr=1e-4))
    for told in run_ranks(given_different_configs, num_ranks=2, args=(one, other)):
        assert "rank 0 and rank 1 were given different configs: optimizer" in told
