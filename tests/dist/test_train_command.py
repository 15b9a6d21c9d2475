"""`shardwise train` as it is typed: one real start of two ranks; what is refused before any rank is started."""

import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from ranks import run_ranks
from train_tasks import reference

from shardwise.doors.cli.app import main
from shardwise.plan import Plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'[task]\nmodel = "{reference("gpt")}"\n[plan]\nmicro_batch = 2\n[train]\nsteps = 40\nlog_every = 2\n'
        "eval_every = 0\n[run]\ntensorboard = false\n"
    )
    return path


def test_the_command_starts_two_ranks_that_train_what_was_set(path: Path, tmp_path: Path) -> None:
    Plan(strategy="zero1", micro_batch=3).save(tmp_path / "plan.toml")
    command = ["train", str(path), "--ranks", "2", "--plan", str(tmp_path / "plan.toml"), "--strategy", "zero2"]
    command += ["--set", "train.steps=4", "--set", "run.device=cpu", "--run", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, "-m", "shardwise", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    starting, building, first, took, *others = result.stdout.splitlines()
    assert starting == "Starting 2 ranks on this machine …"
    assert building == f"Building {reference('gpt')} and opening its data …"
    assert "zero2 on 2 × cpu, fp32: 4 steps of 6 samples" in first
    assert took.endswith("; metrics follow every 2 steps.")
    assert [line.split()[1] for line in others] == ["2/4", "4/4"]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["num_samples"], line["num_ranks"]) for line in written] == [
        (step, 6, 2) for step in range(1, 5)
    ]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["command"][:3] == ["shardwise", "train", str(path)]
    assert environment["command"][-2:] == ["--ranks", "2"]


def refused(path: Path, *options: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that the command ends with, having written nothing."""
    with pytest.raises(SystemExit) as caught:
        main(["train", path.name, *options])
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert list(path.parent.iterdir()) == [path]
    return err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "train.stpes=3"], "InvalidConfig: tiny.toml: unknown key train.stpes; did you mean train.steps?"),
        (["--strategy", "fdsp"], "InvalidConfig: tiny.toml: plan.strategy = 'fdsp': must be one of ddp"),
        (["--plan", "none.toml"], "InvalidConfig: tiny.toml: none.toml: cannot be read"),
        (["--set", "plan.mesh.shard=4", "--ranks", "2"], "InvalidPlan: mesh 1×4 is 4 ranks, but the job has 2"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.chdir(path.parent)
    assert refused(path, *options, capfd=capfd).startswith(message)


@pytest.mark.parametrize(
    ("num_gpus", "options", "message"),
    [
        (2, ["--ranks", "4"], "InvalidConfig: 4 ranks on 2 GPUs: --ranks 2, or --set run.device=cpu"),
        (0, ["--set", "run.device=cuda"], "InvalidConfig: run.device = 'cuda': this machine has no GPU"),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    num_gpus: int,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert refused(path, *options, capfd=capfd).startswith(message)


MINIMAL = Path(__file__).parents[2] / "examples" / "train_minimal.py"


def minimal(rank: int) -> str:
    output = StringIO()
    sys.argv = [str(MINIMAL), "--strategy", "zero2", "--steps", "20"]
    with redirect_stdout(output):
        runpy.run_path(str(MINIMAL), run_name="__main__")
    return output.getvalue()


def test_the_minimal_example_is_short_and_trains_on_two_ranks() -> None:
    assert len(MINIMAL.read_text().splitlines()) < 60
    shown, silent = run_ranks(minimal, num_ranks=2)
    assert silent == ""
    losses = [float(line.split()[3]) for line in shown.splitlines()]
    assert len(losses) == 2
    assert max(losses) < 4.5
