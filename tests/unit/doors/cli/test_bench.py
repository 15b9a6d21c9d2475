"""`shardwise bench`: what is refused before anything is started, and what is printed of what was found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.report.sample_bench import sample_bench

from shardwise.base.errors import InvalidCluster
from shardwise.doors.cli.app import main
from shardwise.hardware import Cluster, device_of
from shardwise.hardware.calibration import HostSpeed, shipped_calibration
from shardwise.measure.bench.benchmark import Asked, BenchStopped
from shardwise.measure.bench.recommendation import recommended
from shardwise.measure.bench.results import Bench, Difference, Equivalence


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(
        '[task]\nmodel = "gpt-tiny"\ndataset = "random"\nseq = 8\n[plan]\nmicro_batch = 2\n[train]\nsteps = 4\n'
        '[run]\ndevice = "cpu"\n'
    )
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "InvalidConfig: nowhere.toml: cannot be read"),
        (["tiny.toml", "--strategy", "ddp,fsdp2"], "UnknownName: unknown strategy 'fsdp2'; did you mean"),
        (["tiny.toml", "--strategy", ","], "UnknownName: unknown strategy ','; known: ddp"),
        (["tiny.toml", "--engines", "pytorch"], "UnknownName: unknown engine 'pytorch'; did you mean torch"),
        (["tiny.toml", "--set", "train.stpes=3"], "InvalidConfig: tiny.toml: unknown key train.stpes"),
        (["tiny.toml", "--set", "plan.mesh.shard=4", "--ranks", "2"], "InvalidPlan: mesh 1×4 is 4 ranks"),
        (["tiny.toml", "--set", "task.model=gpt3"], "UnknownName: unknown model 'gpt3'"),
        (
            ["tiny.toml", "--engines", "torch,captured", "--strategy", "zero1"],
            "InvalidBench: nothing is left to run: torch has no zero1; captured needs a GPU",
        ),
        (
            ["tiny.toml", "--ranks", "2", "--cluster", "4xcpu"],
            "InvalidCluster: --cluster 4xcpu has 4 devices, and the bench 2 ranks",
        ),
        (
            ["tiny.toml", "--ranks", "2", "--cluster", "2xh100"],
            "InvalidCluster: the bench runs on cpu, and 2xh100 is of h100-80gb",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(
    config: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert list(config.parent.iterdir()) == [config]


def test_a_folder_that_holds_a_bench_is_refused(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (config.parent / "bench" / "tiny").mkdir(parents=True)
    (config.parent / "bench" / "tiny" / "bench.json").write_text("{}")
    assert run("tiny.toml") == 2
    assert "bench/tiny holds a bench already" in capfd.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What the command asks for; the answer is a bench that nobody ran."""
    seen: list[Asked] = []

    def answer(wanted: Asked, *, on_progress: Any) -> Bench:
        seen.append(wanted)
        on_progress(0, 1, "round 1: ddp")
        return recommended(sample_bench(name=wanted.name))

    monkeypatch.setattr("shardwise.measure.bench.benchmark.bench", answer)
    return seen


@pytest.mark.usefixtures("config")
class TestCommand:
    def test_it_asks_for_what_was_typed_with_what_is_predicted(self, asked: list[Asked]) -> None:
        options = ["--ranks", "2", "--engines", "shardwise,torch", "--strategy", "fsdp,ddp", "--rounds", "5"]
        options += ["--steps", "8", "--out", "there", "--name", "a b", "--set", "train.seed=3"]
        assert run("tiny.toml", *options) == 0
        (wanted,) = asked
        assert [case.name for case in wanted.cases] == ["ddp", "fsdp", "torch ddp", "torch fsdp"]
        assert (wanted.num_ranks, wanted.rounds, wanted.steps, wanted.folder) == (2, 5, 8, Path("there"))
        assert wanted.config.train.seed == 3
        assert wanted.capacity_bytes is None
        assert wanted.command == (
            "shardwise bench tiny.toml --strategy fsdp,ddp --engines shardwise,torch --ranks 2 --rounds 5 --steps 8 "
            "--warm-up 5 --out there --name 'a b' --set train.seed=3"
        )
        predicted = [case.predicted for case in wanted.cases]
        assert all(one is not None and one.allocated_bytes > 2**20 for one in predicted)
        # Nothing is known of this CPU's speed.
        assert all(one is not None and one.step_seconds is None for one in predicted)
        assert wanted.scaling == ()

    def test_it_probes_the_host_on_its_own(self, asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
        probed: list[str] = []
        timed = replace(device_of("h200"), name="cpu", calibration=shipped_calibration("h200"))
        monkeypatch.setattr("shardwise.hardware.host_here.host_here", lambda kind, title: probed.append(kind))
        monkeypatch.setattr(
            "shardwise.measure.bench.prediction.cluster_here", lambda **asked: Cluster(devices_per_node=1, device=timed)
        )
        assert run("tiny.toml", "--strategy", "ddp") == 0
        assert probed == ["cpu"]
        assert asked[0].cases[0].predicted is not None

    def test_a_host_that_cannot_be_probed_is_said_to_be_assumed(
        self, asked: list[Asked], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(kind: str, title: str) -> HostSpeed:
            raise InvalidCluster("this host cannot be probed: busy")

        timed = replace(device_of("h200"), name="cpu", calibration=shipped_calibration("h200"))
        monkeypatch.setattr("shardwise.hardware.host_here.host_here", refuse)
        monkeypatch.setattr(
            "shardwise.measure.bench.prediction.cluster_here", lambda **asked: Cluster(devices_per_node=1, device=timed)
        )
        assert run("tiny.toml", "--strategy", "ddp") == 0
        assert "the speed of the host is assumed: this host cannot be probed: busy" in capfd.readouterr().err
        assert asked[0].cases[0].predicted is not None

    def test_an_optimizer_that_the_planner_does_not_know_is_benched_all_the_same(
        self, asked: list[Asked], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run("tiny.toml", "--set", "optimizer.name=radam") == 0
        assert all(case.predicted is None for case in asked[0].cases)
        assert "nothing is predicted: unknown optimizer of the planner 'radam'" in capfd.readouterr().err

    @pytest.mark.usefixtures("asked")
    def test_table_words_path_and_the_next_command(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert run("tiny.toml", "--out", "a b", "--name", "[red]x") == 0
        out, err = capfd.readouterr()
        lines = out.splitlines()
        assert lines[0].startswith("[red]x: gpt-tiny")
        assert lines[3].split()[0] == "ddp"
        assert any(line.startswith("Use ddp: ") for line in lines)
        assert lines[-2:] == ["a b/bench.json", "next: shardwise report 'a b'"]
        assert err == "0/1 round 1: ddp\n"

    @pytest.mark.usefixtures("asked")
    def test_json_is_the_bench_alone(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert run("tiny.toml", "--json", "--name", "mine") == 0
        found = Bench.from_data(json.loads(capfd.readouterr().out))
        assert found == recommended(sample_bench(name="mine"))

    def test_a_bench_that_is_refused_ends_with_1(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        difference = Difference(case="fsdp", text="fsdp: wrong", excess=9.0)
        found = recommended(replace(sample_bench(), equivalence=Equivalence(differences=(difference,), largest=9.0)))
        monkeypatch.setattr("shardwise.measure.bench.benchmark.bench", lambda wanted, *, on_progress: found)
        assert run("tiny.toml") == 1
        assert "  fsdp: wrong\n" in capfd.readouterr().out

    def test_a_case_that_failed_ends_with_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def answer(wanted: Asked, *, on_progress: Any) -> Bench:
            wanted.cases[0].fail("rank 0: out of memory")
            return recommended(sample_bench())

        monkeypatch.setattr("shardwise.measure.bench.benchmark.bench", answer)
        assert run("tiny.toml") == 1

    def test_an_interrupt_says_where_the_rest_is(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        import signal

        def answer(wanted: Asked, *, on_progress: Any) -> Bench:
            raise BenchStopped(signal.SIGTERM)

        monkeypatch.setattr("shardwise.measure.bench.benchmark.bench", answer)
        assert run("tiny.toml", "--out", "there") == 128 + signal.SIGTERM
        out, err = capfd.readouterr()
        assert out == ""
        assert err == "stopped by SIGTERM: the results so far are in there/bench.json\n"
