"""The bench with ranks that nobody starts: which runs there are, in which order, and what is kept of them."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.measure.bench.benchmark import Asked, BenchStopped, RunFailed, bench, run_ranks, turns
from shardwise.measure.bench.case import NOT_REACHED, Case, cases_of
from shardwise.measure.bench.results import Bench, InvalidBench, load_bench
from shardwise.measure.bench.run_files import BenchRun, Found
from shardwise.measure.report.text.comparison import remarks
from shardwise.training.config.config import TrainConfig

CONFIG = TrainConfig.from_dict(
    {
        "task": {"model": "gpt-tiny", "seq": 8},
        "plan": {"micro_batch": 2},
        "train": {"steps": 10},
        "run": {"folder": "nowhere", "device": "cpu"},
    }
)
SECONDS = {"ddp": 0.1, "zero1": 0.2, "fsdp": 0.3}
NUM_RANKS = 2


def cases(*names: str, engines: tuple[str, ...] = ("shardwise",)) -> list[Case]:
    return cases_of(CONFIG, engines=engines, strategies=names or tuple(SECONDS))


def found(wanted: BenchRun, *, rank: int, **changes: Any) -> Found:
    seconds = SECONDS[wanted.config.plan.strategy] * (0.5 if wanted.silent else 1.0)
    values: dict[str, Any] = {
        "rank": rank,
        "environment": {"torch": "2.13", "device": "cpu"},
        "losses": (5.0 + rank, 4.0 + rank),
        # Rank 1 is the slower one.
        "block_seconds": (seconds * (1 + rank),) * wanted.blocks,
        "first_step_seconds": 3.0 + rank,
        "step_samples": 4,
        "step_tokens": 32,
        "grad_norms": (1.0,),
        "param_norms": {"weight": 1.0},
        "dtypes": {"compute": ("float32",)},
        "allocated_bytes": 1000 + rank,
        "sent_bytes": 10,
    }
    return Found(**{**values, **changes})


class Fake:
    """A launcher that notes what it is asked for; `spoil` may raise, or change what the ranks found."""

    def __init__(
        self, spoil: Callable[[BenchRun, str, list[Found]], list[Found]] = lambda run, name, ranks: ranks
    ) -> None:
        self.names: list[str] = []
        self.runs: list[BenchRun] = []
        self._spoil = spoil

    def __call__(self, wanted: BenchRun, folder: Path) -> list[Found]:
        self.names.append(folder.name)
        self.runs.append(wanted)
        return self._spoil(wanted, folder.name, [found(wanted, rank=rank) for rank in range(NUM_RANKS)])


def asked(folder: Path, **changes: Any) -> Asked:
    values: dict[str, Any] = {
        "config": CONFIG,
        "cases": cases(),
        "num_ranks": NUM_RANKS,
        "folder": folder / "out",
        "name": "<script>",
        "command": "shardwise bench",
        "rounds": 2,
    }
    return Asked(**{**values, **changes})


class TestOrder:
    def test_rounds_are_interleaved_and_begin_with_another_case_each(self, tmp_path: Path) -> None:
        fake = Fake()
        bench(asked(tmp_path), run=fake)
        assert fake.names == [
            f"{turn}-shardwise-{strategy}"
            for turn, strategies in (
                ("round-1", ("ddp", "zero1", "fsdp")),
                ("silent", ("zero1", "fsdp", "ddp")),
                ("round-2", ("fsdp", "ddp", "zero1")),
            )
            for strategy in strategies
        ]
        assert [run.detailed for run in fake.runs] == [True] * 3 + [False] * 6
        assert [run.silent for run in fake.runs] == [False] * 3 + [True] * 3 + [False] * 3

    def test_each_case_runs_its_own_plan_and_everything_else_is_the_same(self, tmp_path: Path) -> None:
        fake = Fake()
        bench(asked(tmp_path, cases=cases("ddp", "fsdp", engines=("shardwise", "torch"))), run=fake)
        assert [(run.engine, run.config.plan.engine, run.config.plan.strategy) for run in fake.runs[:4]] == [
            ("shardwise", "shardwise", "ddp"),
            ("shardwise", "shardwise", "fsdp"),
            ("torch", "torch", "ddp"),
            ("torch", "torch", "fsdp"),
        ]
        assert {replace(run.config, plan=CONFIG.plan) for run in fake.runs} == {CONFIG}

    def test_one_round_is_one_run_and_one_silent_run_a_case(self) -> None:
        assert [turn.round for turn in turns(cases(), rounds=1, num_ranks=2)] == ["round-1"] * 3 + ["silent"] * 3
        assert [turn.round for turn in turns(cases(), rounds=1, num_ranks=1)] == ["round-1"] * 3

    @pytest.mark.parametrize(("steps", "blocks", "block_steps"), [(20, 4, 5), (1, 1, 1), (3, 3, 1), (9, 4, 3)])
    def test_steps_are_timed_in_whole_blocks(self, tmp_path: Path, steps: int, blocks: int, block_steps: int) -> None:
        wanted = asked(tmp_path, steps=steps)
        assert (wanted.blocks, wanted.block_steps) == (blocks, block_steps)

    def test_progress_counts_the_runs(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int, str]] = []
        bench(asked(tmp_path, cases=cases("ddp"), rounds=1), run=Fake(), on_progress=lambda *one: seen.append(one))
        assert seen == [
            (0, 2, "round 1: ddp"),
            (1, 2, "silent: ddp"),
            (2, 2, "done"),
        ]


class TestResult:
    def test_what_the_ranks_found_is_one_case(self, tmp_path: Path) -> None:
        result = bench(asked(tmp_path, steps=8), run=Fake())
        first = result.cases[0]
        assert first.losses == (5.5, 4.5)
        assert first.step_seconds is not None
        assert first.step_seconds.values == pytest.approx([0.2] * 8)
        assert first.silent_seconds is not None
        assert first.silent_seconds.values == pytest.approx([0.1] * 4)
        assert first.exposed_seconds == pytest.approx(0.1)
        assert first.first_step_seconds is not None
        assert first.first_step_seconds.values == (4.0, 4.0)
        assert first.allocated_bytes == (1000, 1001)
        assert first.sent_bytes == 10
        assert result.recommended == 0
        assert (result.step_samples, result.step_tokens) == (4, 32)
        assert result.machine == {"torch": "2.13", "device": "cpu", "num_ranks": 2}
        assert result.settings["plan.micro_batch"] == 2
        assert result.settings["bench.steps"] == 8
        assert not any(name.startswith(("run.", "checkpoint.", "plan.strategy")) for name in result.settings)

    def test_the_file_holds_the_same(self, tmp_path: Path) -> None:
        result = bench(asked(tmp_path), run=Fake())
        assert load_bench(tmp_path / "out") == result
        assert result.name == "<script>"

    def test_what_an_engine_cannot_run_says_why_and_is_not_started(self, tmp_path: Path) -> None:
        fake = Fake()
        result = bench(asked(tmp_path, cases=cases("ddp", "zero1", engines=("torch",))), run=fake)
        assert [(case.name, case.why_not) for case in result.cases] == [
            ("torch ddp", ""),
            ("torch zero1", "torch has no zero1"),
        ]
        assert set(fake.names) == {"round-1-torch-ddp", "silent-torch-ddp", "round-2-torch-ddp"}

    def test_nothing_left_to_run_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidBench, match="nothing is left to run: torch has no zero1; torch has no zero2"):
            bench(asked(tmp_path, cases=cases("zero1", "zero2", engines=("torch",))), run=Fake())
        assert list(tmp_path.iterdir()) == []


def fails(which: str) -> Fake:
    def spoil(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
        if name == which:
            raise RunFailed("rank 1: OutOfMemoryError: 3 GiB too much")
        return ranks

    return Fake(spoil)


class TestFailure:
    @pytest.mark.parametrize("which", ["round-1-shardwise-ddp", "round-2-shardwise-ddp"])
    def test_a_case_that_fails_is_out_and_the_others_go_on(self, tmp_path: Path, which: str) -> None:
        fake, wanted = fails(which), asked(tmp_path, rounds=3)
        result = bench(wanted, run=fake)
        assert result.cases[0].why_not == "rank 1: OutOfMemoryError: 3 GiB too much"
        assert not result.cases[0].ran
        assert [case.failed for case in wanted.cases] == [True, False, False]
        assert all(case.step_seconds is not None and len(case.step_seconds.values) == 12 for case in result.cases[1:])
        assert result.recommended == 1
        after = fake.names[fake.names.index(which) + 1 :]
        assert not any(name.endswith("-ddp") for name in after)

    def test_without_a_run_with_the_wire_cut_the_others_stand(self, tmp_path: Path) -> None:
        fake, wanted = fails("silent-shardwise-ddp"), asked(tmp_path, rounds=3)
        result = bench(wanted, run=fake)
        first = result.cases[0]
        assert not wanted.cases[0].failed
        assert first.step_seconds is not None
        assert len(first.step_seconds.values) == 12
        assert (first.why_not, first.exposed_seconds) == ("", None)
        assert all(case.exposed_seconds is not None for case in result.cases[1:])
        (line,) = [line for line in remarks(result) if line.startswith("ddp: ")]
        assert line.endswith("so what is exposed is not known: rank 1: OutOfMemoryError: 3 GiB too much")
        assert load_bench(tmp_path / "out") == result

    def test_where_all_fail_nothing_is_recommended(self, tmp_path: Path) -> None:
        result = bench(asked(tmp_path, cases=cases("ddp")), run=fails("round-1-shardwise-ddp"))
        assert (result.recommended, result.why) == (None, "Nothing ran.")

    def test_an_error_of_ours_is_not_a_case_that_failed(self, tmp_path: Path) -> None:
        def spoil(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
            raise KeyError(name)

        with pytest.raises(KeyError):
            bench(asked(tmp_path), run=Fake(spoil))


def wrong_zero1(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
    if wanted.config.plan.strategy != "zero1":
        return ranks
    return [replace(rank, param_norms={"weight": 4 / 3}) for rank in ranks]


class TestGate:
    def test_after_round_1_it_stops_the_bench_and_refuses_to_rank(self, tmp_path: Path) -> None:
        fake = Fake(wrong_zero1)
        result = bench(asked(tmp_path), run=fake)
        assert len(fake.names) == 3
        assert [difference.case for difference in result.equivalence.differences] == ["zero1"]
        assert result.recommended is None
        assert "zero1" in result.why

    def test_with_keep_going_all_is_timed_and_nothing_is_ranked(self, tmp_path: Path) -> None:
        fake = Fake(wrong_zero1)
        result = bench(asked(tmp_path, keep_going=True), run=fake)
        assert len(fake.names) == 9
        assert result.recommended is None

    def test_a_training_that_fell_apart_can_be_written_and_read(self, tmp_path: Path) -> None:
        def spoil(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
            return [replace(rank, losses=(float("nan"), float("inf"))) for rank in ranks]

        bench(asked(tmp_path), run=Fake(spoil))
        result = load_bench(tmp_path / "out")
        assert str(result.cases[0].losses) == "(nan, inf)"
        assert result.equivalence.largest == float("inf")
        assert not result.equivalence.agrees


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_what_was_measured_until_then_is_kept(self, tmp_path: Path, number: signal.Signals) -> None:
        def spoil(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
            if name == "round-2-shardwise-ddp":
                os.kill(os.getpid(), number)
            return ranks

        before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(BenchStopped) as caught:
            bench(asked(tmp_path), run=Fake(spoil))
        assert caught.value.number == number
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
        left = load_bench(tmp_path / "out")
        assert all(case.ran for case in left.cases)
        assert left.recommended is None
        assert left.why == "Unfinished: 7 of 9 runs."

    def test_the_file_is_there_from_the_first_moment_on(self, tmp_path: Path) -> None:
        seen: list[Bench] = []

        def spoil(wanted: BenchRun, name: str, ranks: list[Found]) -> list[Found]:
            seen.append(load_bench(tmp_path / "out"))
            return ranks

        bench(asked(tmp_path, rounds=1), run=Fake(spoil))
        assert [sum(case.ran for case in one.cases) for one in seen] == [0, 1, 2, 3, 3, 3]
        assert {case.why_not for one in seen for case in one.cases if not case.ran} == {NOT_REACHED}


class TestFolder:
    def test_a_folder_with_a_bench_is_refused_unless_it_may_be_overwritten(self, tmp_path: Path) -> None:
        bench(asked(tmp_path), run=Fake())
        before = (tmp_path / "out" / "bench.json").read_bytes()
        with pytest.raises(InvalidBench, match="holds a bench already: choose another --out, or --overwrite"):
            bench(asked(tmp_path), run=Fake())
        assert (tmp_path / "out" / "bench.json").read_bytes() == before
        bench(asked(tmp_path, overwrite=True), run=Fake())

    def test_runs_of_an_older_bench_go_and_what_is_not_of_a_bench_stays(self, tmp_path: Path) -> None:
        old, other = tmp_path / "out/runs/round-9-shardwise-ddp", tmp_path / "out/runs/training"
        for folder, file in ((old, "asked.json"), (other, "metrics.jsonl")):
            folder.mkdir(parents=True)
            (folder / file).touch()
        bench(asked(tmp_path), run=Fake())
        assert not old.exists()
        assert other.exists()

    def test_a_folder_that_cannot_be_is_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "out").touch()
        with pytest.raises(InvalidBench, match="cannot be written"):
            bench(asked(tmp_path), run=Fake())


def test_a_run_is_told_in_a_file_and_leaves_a_file_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    wanted = BenchRun(config=CONFIG, engine="shardwise")

    def run_job(arguments: tuple[str, ...], **options: Any) -> None:
        calls.append({"arguments": arguments, **options})
        folder = Path(arguments[0])
        told = BenchRun.from_data(json.loads((folder / "asked.json").read_text()))
        for rank in range(NUM_RANKS):
            found(
                replace(told, config=replace(told.config, plan=replace(CONFIG.plan, strategy="ddp"))), rank=rank
            ).save(folder)

    monkeypatch.setattr("shardwise.training.launch.launch.run_job", run_job)
    ranks = run_ranks(wanted, tmp_path / "run", num_ranks=NUM_RANKS)
    assert [rank.rank for rank in ranks] == [0, 1]
    (call,) = calls
    assert call["program"] == "shardwise.measure.bench.worker"
    assert (call["num_ranks"], call["max_restarts"], call["folder"]) == (2, 0, tmp_path / "run")
