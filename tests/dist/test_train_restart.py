"""A run that is interrupted, anywhere and however often, ends as one that was not."""

import multiprocessing
import os
import signal
import warnings
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailed, run_ranks
from rich.console import Console
from train_tasks import assert_same_end, assert_seen_once_per_epoch, config, curve, lines, reference, trained
from whole import whole

from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.metrics import StepMetrics
from shardwise.training.rank_run import Outcome, train


def on_ranks(asked: TrainConfig, *, num_ranks: int = 2, crash_after: int | None = None) -> list[Any]:
    return run_ranks(trained, num_ranks=num_ranks, args=(asked, crash_after))


@pytest.mark.parametrize(
    "plan",
    [
        {"strategy": "fsdp", "accumulate": 2},
        {"strategy": "ddp", "engine": "torch"},
        *whole(
            {"strategy": "ddp"}, {"strategy": "zero1", "precision": "fp16"}, {"strategy": "fsdp", "engine": "torch"}
        ),
    ],
    ids=lambda plan: " ".join(map(str, plan.values())),
)
def test_after_two_crashes_losses_and_weights_are_bit_identical(tmp_path: Path, plan: dict[str, Any]) -> None:
    def asked(name: str) -> TrainConfig:
        return config(tmp_path / name, plan=plan, train={"steps": 12, "eval_every": 4})

    on_ranks(asked("whole"))
    for crash_after in (3, 8, None):
        on_ranks(asked("crashed"), crash_after=crash_after)
    assert [step for step, _, _ in curve(tmp_path / "crashed")] == list(range(1, 13))
    assert_same_end(tmp_path / "whole", tmp_path / "crashed")


def test_a_run_goes_on_with_units_in_host_memory_and_back(tmp_path: Path) -> None:
    def asked(name: str, steps: int, **plan: Any) -> TrainConfig:
        train, schedule = {"steps": steps, "clip_norm": 0}, {"name": "constant"}
        return config(tmp_path / name, plan=plan, train=train, schedule=schedule)

    on_ranks(asked("changed", 3, offload_states=["blocks.1", "(root)"], update="backward"))
    on_ranks(asked("changed", 5, strategy="zero2", offload_states=True, offload_update="host"))
    on_ranks(asked("changed", 7, offload_activations=["blocks.*"]))
    on_ranks(asked("changed", 9, offload_states=["blocks.0"]))
    on_ranks(asked("same", 9))
    assert_same_end(tmp_path / "changed", tmp_path / "same")


def test_an_asynchronous_checkpoint_is_as_good(tmp_path: Path) -> None:
    for name, crashes in (("whole", (None,)), ("crashed", (9, None))):
        asked = config(tmp_path / name, train={"steps": 12}, checkpoint={"asynchronous": True, "every": 2})
        for crash_after in crashes:
            on_ranks(asked, crash_after=crash_after)
    assert_same_end(tmp_path / "whole", tmp_path / "crashed")


@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp")])
def test_every_sample_counts_once_an_epoch_also_when_the_number_of_ranks_changes(tmp_path: Path, strategy: str) -> None:
    """15 samples three times: 2 ranks × 2 × 2 a step, then 1 rank, then 2 ranks, whose last step has 5 left."""
    asked = config(
        tmp_path,
        task={"model": reference("table")},
        plan={"strategy": strategy, "micro_batch": 2, "accumulate": 2},
        optimizer={"name": "sgd", "lr": 1.0},
        schedule={"name": "constant"},
        train={"epochs": 3, "clip_norm": 0},
        checkpoint={"every": 2},
    )
    for num_ranks, crash_after in ((2, 3), (1, 5), (2, None)):
        on_ranks(asked, num_ranks=num_ranks, crash_after=crash_after)
    written = lines(tmp_path)
    assert [(line["num_samples"], line["num_ranks"]) for line in written] == [
        (8, 2), (8, 2), (4, 1), (4, 1), (8, 2), (8, 2), (5, 2)
    ]  # fmt: skip
    assert_seen_once_per_epoch(tmp_path, num_epochs=3)


def test_losses_on_other_numbers_of_ranks_are_of_the_same_samples(tmp_path: Path) -> None:
    """Without dropout one rank with twice the passes computes what two ranks do."""
    gpt = {"model": "gpt-tiny", "dataset": "stdlib", "seq": 8}
    for name, num_ranks, accumulate in (("two", 2, 1), ("one", 1, 2)):
        asked = config(tmp_path / name, task=gpt, plan={"accumulate": accumulate}, train={"steps": 2})
        on_ranks(asked, num_ranks=num_ranks)
    for (_, one, _), (_, two, _) in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def told_to_stop(rank: int, asked: TrainConfig, told: int, number: signal.Signals) -> tuple[Outcome, bool]:
    """The body of ranks of which one gets a signal after step 3."""
    if number == signal.SIGHUP:
        # As in a terminal: under nohup it would be ignored.
        signal.signal(number, signal.SIG_DFL)
    handler = signal.getsignal(number)

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 3 and rank == told:
            os.kill(os.getpid(), number)

    outcome = train(asked, on_step=on_step)
    return outcome, signal.getsignal(number) is handler


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (0, signal.SIGTERM),
        (1, signal.SIGUSR1),
        *whole((1, signal.SIGTERM)),
        pytest.param(1, signal.SIGHUP, marks=pytest.mark.ledger("hangup", outcome="right")),
    ],
)
def test_a_signal_on_one_rank_stops_both_after_the_same_step_with_a_checkpoint(
    tmp_path: Path, told: int, number: signal.Signals
) -> None:
    (one, restored), (other, _) = run_ranks(
        told_to_stop, num_ranks=2, args=(config(tmp_path / "stopped", train={"steps": 12}), told, number)
    )
    assert one.preempted
    assert other.preempted
    assert one.step == other.step
    # It was told after step 3, says so after step 4, and all read it after step 5.
    assert one.step <= 5
    assert restored
    assert max((tmp_path / "stopped" / "checkpoints").glob("step-*")).name == f"step-{one.step:08d}"
    for name in ("stopped", "whole"):
        on_ranks(config(tmp_path / name, train={"steps": 12}))
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")


def told_with_its_workers(rank: int, asked: TrainConfig) -> Outcome:
    """As a cluster does it that signals every process of a job."""

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            workers = multiprocessing.active_children()
            assert len(workers) == 1
            for process in (*(worker.pid for worker in workers), os.getpid()):
                os.kill(process, signal.SIGUSR1)
                os.kill(process, signal.SIGTERM)

    return train(asked, on_step=on_step)


def test_signals_also_to_the_processes_that_load_samples_stop_well(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 40}, data={"workers": 1})
    (outcome,) = run_ranks(told_with_its_workers, num_ranks=1, args=(asked,))
    assert outcome.preempted
    assert outcome.step <= 5


def told_twice(rank: int, asked: TrainConfig, times: int) -> None:
    def on_step(metrics: StepMetrics) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        if times == 1:
            torch.distributed.distributed_c10d._get_default_store().wait(["never"])

    train(asked, on_step=on_step)


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_sigterm_or_the_end_of_the_grace_time_kills(tmp_path: Path, times: int) -> None:
    """Also a rank that waits in vain in a collective, where Python runs no handler."""
    asked = config(tmp_path, train={"steps": 12}, checkpoint={"grace_seconds": 1.2})
    with pytest.raises(RankFailed, match="exit code -15"):
        run_ranks(told_twice, num_ranks=1, args=(asked, times))


def resumed(rank: int, asked: TrainConfig) -> tuple[str, list[str]]:
    """What a run says on its console, and its warnings."""
    output = StringIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(asked, console=Console(file=output, width=1000))
    return output.getvalue(), [str(warning.message) for warning in caught]


def test_a_checkpoint_that_is_passed_over_or_not_removed_is_a_line_and_the_run_goes_on(tmp_path: Path) -> None:
    run_ranks(resumed, num_ranks=1, args=(config(tmp_path, train={"steps": 10}),))
    first, second = sorted((tmp_path / "checkpoints").glob("step-*"))
    (first / ".ipynb_checkpoints").mkdir()
    content = (second / "rank-00000.safetensors").read_bytes()
    (second / "rank-00000.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for steps, line in (
        (20, f"checkpoint passed over: {second / 'rank-00000.safetensors'}: is damaged"),
        (25, "Resuming after step 20"),
    ):
        ((said, warned),) = run_ranks(resumed, num_ranks=1, args=(config(tmp_path, train={"steps": steps}),))
        assert any(one.startswith(line) for one in said.splitlines())
        assert not [one for one in warned if "checkpoint" in one]
        left = [one for one in said.splitlines() if ".ipynb_checkpoints was not removed (Is a directory)" in one]
        assert len(left) == (steps == 20)
