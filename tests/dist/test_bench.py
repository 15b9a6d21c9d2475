"""`shardwise bench` on two real ranks: as it is typed, and with strategies in which something was planted."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import left_with
from ranks import run_ranks

from shardwise.bench.results import load_bench
from shardwise.bench.run_files import BenchRun, Found
from shardwise.bench.worker import run_rank
from shardwise.cli.app import main
from shardwise.engine.grads.bucket import ReduceBucket
from shardwise.engine.params.unit import Unit
from shardwise.tasks import Task, load_task

OPTIONS = ("--ranks", "2", "--rounds", "1", "--steps", "2", "--warm-up", "3")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(
        '[task]\nmodel = "gpt-tiny"\ndataset = "random"\nseq = 8\n[plan]\nmicro_batch = 2\n[train]\nsteps = 5\n'
        '[run]\ndevice = "cpu"\n'
    )
    return path


@pytest.mark.timeout(300)
def test_the_command_measures_each_strategy_in_fresh_processes_and_says_which_to_use(config: Path) -> None:
    out = config.parent / "out"
    command = ["bench", str(config), *OPTIONS, "--strategy", "fsdp,ddp", "--out", str(out), "--name", "<b>"]
    mark = f"BENCH_TEST={config.parent}"
    result = subprocess.run(
        [sys.executable, "-m", "shardwise", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_TEST": str(config.parent)},
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert left_with(mark) == []
    assert [line.split(" ", 1)[1] for line in result.stderr.splitlines()] == [
        "round 1: ddp",
        "round 1: fsdp",
        "silent: fsdp",
        "silent: ddp",
        "done",
    ]
    assert "Same training: both agree" in result.stdout
    assert result.stdout.splitlines()[-1] == f"next: shardwise report {out}"
    found = load_bench(out)
    assert [case.name for case in found.cases] == ["ddp", "fsdp"]
    assert found.recommended is not None
    assert (found.name, found.num_ranks, found.step_samples, found.step_tokens) == ("<b>", 2, 4, 32)
    for case in found.cases:
        assert len(case.losses) == 5
        assert case.step_seconds is not None
        assert len(case.step_seconds.values) == 2
        assert case.silent_seconds is not None
        assert case.ledgers
        assert case.tape
        assert case.memory_error is not None
    assert found.cases[1].peak_bytes < found.cases[0].peak_bytes
    asked = json.loads((out / "runs" / "round-1-shardwise-fsdp" / "asked.json").read_text())
    assert BenchRun.from_data(asked).config.plan.strategy == "fsdp"


BIAS = "blocks.1.feed_forward.down.bias"


@contextmanager
def one_gradient_divided_by_3() -> Iterator[None]:
    """Instead of by the number of ranks, which is 2."""
    take_grads = ReduceBucket.take_grads

    def wrong(self: ReduceBucket, unit: Unit) -> None:
        take_grads(self, unit)
        for segment in self.segments:
            for flat in (flat for flat in segment.flats if any(flat is own for own in unit.flats)):
                for name, view in zip(flat.names, segment.views(flat), strict=True):
                    if name == BIAS:
                        view.mul_(2 / 3)

    with mock.patch.object(ReduceBucket, "take_grads", wrong):
        yield


def task_in_float64(*args: Any, **options: Any) -> Task:
    task = load_task(*args, **options)
    return replace(task, model=task.model.double())


def planted(rank: int, data: dict[str, Any]) -> Found:
    """The body of a rank: zero1 divides one gradient by the wrong number, zero2 trains in float64."""
    run = BenchRun.from_data(data)
    plan = run.config.plan
    if plan.strategy == "zero1":
        with one_gradient_divided_by_3():
            # Its dtypes are not needed, and a recorded step takes most of the time.
            return run_rank(replace(run, detailed=False))
    if plan.strategy == "zero2":
        run = replace(run, config=replace(run.config, plan=replace(plan, precision="native")))
        with mock.patch("shardwise.train.setup.load_task", task_in_float64):
            return run_rank(run)
    return run_rank(run)


def test_the_gate_names_a_wrong_gradient_and_unequal_dtypes_and_ranks_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def run(wanted: BenchRun, folder: Path, *, num_ranks: int) -> list[Found]:
        runs.append(folder.name)
        return run_ranks(planted, num_ranks=num_ranks, args=(wanted.to_data(),))

    monkeypatch.setattr("shardwise.bench.benchmark.run_ranks", run)
    out = config.parent / "out"
    with pytest.raises(SystemExit) as caught:
        main(["bench", str(config), *OPTIONS, "--strategy", "ddp,zero1,zero2,fsdp", "--out", str(out)])
    assert caught.value.code == 1
    shown = capfd.readouterr().out
    found = load_bench(out)
    gradient, *dtypes = [difference.text for difference in found.equivalence.differences]
    assert gradient.startswith(f"zero1: the gradient of {BIAS} in step 1 is 0.6667 times that of ddp (")
    assert "more" not in gradient
    assert sorted(dtypes) == [
        f"zero2: the dtype of {kind} is float64, and float32 in ddp" for kind in ("compute", "grads", "master", "optim")
    ]
    assert found.recommended is None
    assert all(text in shown for text in (gradient, *dtypes))
    assert "Use " not in shown
    # Nothing is timed any further.
    assert [name.split("-")[1] for name in runs] == ["1"] * 4
