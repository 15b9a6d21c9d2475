"""`shardwise bench` on two real ranks: as it is typed, and with strategies in which something was planted."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import ranks_left
from ranks import run_ranks

from shardwise.doors.cli.app import main
from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.unit import Unit
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import load_bench
from shardwise.measure.bench.run_files import ASKED, BenchRun, Found
from shardwise.measure.bench.worker import run_rank
from shardwise.models.tasks import Task, load_task

OPTIONS = ("--ranks", "2", "--rounds", "1", "--steps", "2", "--warm-up", "3")


def write_config(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(
        '[task]\nmodel = "gpt-tiny"\ndataset = "random"\nseq = 8\n[plan]\nmicro_batch = 2\n[train]\nsteps = 5\n'
        '[run]\ndevice = "cpu"\n'
    )
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A bench: what it printed, the ranks that it left running, its folder, and how long it took."""

    shown: str
    progress: str
    left: list[str]
    out: Path
    seconds: float


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Ended:
    folder = tmp_path_factory.mktemp("bench")
    out, began = folder / "out", time.monotonic()
    command = ["bench", str(write_config(folder)), *OPTIONS, "--strategy", "fsdp", "--out", str(out), "--name", "<b>"]
    with (
        redirect_stdout(StringIO()) as shown,
        redirect_stderr(StringIO()) as progress,
        pytest.raises(SystemExit) as caught,
    ):
        main(command)
    assert caught.value.code == 0, progress.getvalue()
    seconds = time.monotonic() - began
    return Ended(shown=shown.getvalue(), progress=progress.getvalue(), left=ranks_left(), out=out, seconds=seconds)


def check_measured(case: CaseResult) -> None:
    assert len(case.losses) == 5
    assert case.step_seconds is not None
    assert len(case.step_seconds.values) == 2
    assert case.silent_seconds is not None
    assert case.ledgers
    assert case.tape
    assert case.memory_error is not None


@pytest.mark.timeout(300)
def test_the_command_measures_a_strategy_in_fresh_processes_with_and_without_communication(typed: Ended) -> None:
    assert typed.left == []
    assert [line.split(" ", 1)[1] for line in typed.progress.splitlines()] == [
        "round 1: fsdp",
        "silent: fsdp",
        "done",
    ]
    assert typed.shown.splitlines()[-1] == f"next: shardwise report {typed.out}"
    found = load_bench(typed.out)
    assert (found.name, found.num_ranks, found.step_samples, found.step_tokens) == ("<b>", 2, 4, 32)
    (case,) = found.cases
    assert case.name == "fsdp"
    check_measured(case)
    asked = json.loads((typed.out / "runs" / "round-1-shardwise-fsdp" / ASKED).read_text())
    assert BenchRun.from_data(asked).config.plan.strategy == "fsdp"


def check_silent(folder: Path, *, limit_seconds: float) -> None:
    """What the ranks of a silent run have left in its folder."""
    asked = BenchRun.from_data(json.loads((folder / ASKED).read_text()))
    first, second = (Found.load(folder, rank=rank) for rank in range(2))
    assert len(first.block_seconds) == asked.blocks
    assert min(first.block_seconds) > 0
    assert first.block_seconds == second.block_seconds
    assert 0 < first.first_step_seconds < limit_seconds
    assert first.losses == first.grad_norms == first.tape == ()
    assert first.ledger is None


@pytest.mark.timeout(300)
def test_a_silent_run_gives_times_and_nothing_else(typed: Ended) -> None:
    check_silent(typed.out / "runs" / "silent-shardwise-fsdp", limit_seconds=typed.seconds)


def as_asked(rank: int, data: dict[str, Any]) -> Found:
    return run_rank(BenchRun.from_data(data))


def test_strategies_that_train_the_same_agree_and_one_of_them_is_recommended(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On ranks of the pool, where a silent run is one more with communication."""

    def run(wanted: BenchRun, folder: Path, *, num_ranks: int) -> list[Found]:
        return run_ranks(as_asked, num_ranks=num_ranks, args=(wanted.to_data(),))

    monkeypatch.setattr("shardwise.measure.bench.benchmark.run_ranks", run)
    out = config.parent / "out"
    with pytest.raises(SystemExit) as caught:
        main(["bench", str(config), *OPTIONS, "--strategy", "fsdp,ddp", "--out", str(out)])
    assert caught.value.code == 0
    shown, progress = capfd.readouterr()
    assert [line.split(" ", 1)[1] for line in progress.splitlines()] == [
        "round 1: ddp",
        "round 1: fsdp",
        "silent: fsdp",
        "silent: ddp",
        "done",
    ]
    assert "Same training: both agree" in shown
    found = load_bench(out)
    ddp, fsdp = found.cases
    assert [case.name for case in found.cases] == ["ddp", "fsdp"]
    assert found.recommended is not None
    check_measured(ddp)
    check_measured(fsdp)
    assert fsdp.peak_bytes < ddp.peak_bytes


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
        with mock.patch("shardwise.models.tasks.load_task", task_in_float64):
            return run_rank(run)
    return run_rank(run)


def test_the_gate_names_a_wrong_gradient_and_unequal_dtypes_and_ranks_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def run(wanted: BenchRun, folder: Path, *, num_ranks: int) -> list[Found]:
        runs.append(folder.name)
        return run_ranks(planted, num_ranks=num_ranks, args=(wanted.to_data(),))

    monkeypatch.setattr("shardwise.measure.bench.benchmark.run_ranks", run)
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
