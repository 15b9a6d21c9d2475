import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from measure.report.sample_bench import sample_bench
from plans import bad_plan_files
from torch import nn

import shardwise
from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.vocabulary import tested_versions
from shardwise.checkpoint import Checkpoints
from shardwise.doors.cli.app import app, main
from shardwise.doors.cli.help_pages import COMMANDS, OPTIONS
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardwise", *arguments], capture_output=True, text=True, check=False)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def test_two_hundred_bad_plans_are_one_line_and_exit_code_2_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    for what, content in bad_plan_files(200):
        path.write_bytes(content)
        assert exit_code("doctor", str(path)) == 2, what
        out, err = capfd.readouterr()
        assert out == "", what
        assert err.startswith(f"InvalidPlan: {path}: "), (what, err)
        assert err.count("\n") == 1, (what, err)


def test_a_bad_plan_in_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("micro_batch = -3\n")
    result = run("doctor", str(tmp_path / "plan.toml"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"InvalidPlan: {tmp_path}/plan.toml: micro_batch = -3: must be a whole number of at least 1\n"
    )
    assert "Traceback" in run("--debug", "doctor", str(tmp_path / "plan.toml")).stderr


def test_debug_is_taken_before_and_after_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text("micro_batch = -3\n")
    for arguments in (("--debug", "doctor"), ("doctor", "--debug")):
        with pytest.raises(InvalidPlan):
            main([*arguments, str(tmp_path / "plan.toml")])
    with pytest.raises(ShardwiseError, match="nothing"):
        main(["plan", "gpt-tiny", "--cluster", "nothing", "--debug"])
    # A file of that name.
    assert exit_code("doctor", "--", "--debug") == 2
    assert "--debug: " in capfd.readouterr().err


def test_doctor_says_who_holds_what(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Plan(strategy="zero2", overrides={"head": "ddp"}).save(tmp_path / "plan.toml")
    assert exit_code("doctor", str(tmp_path / "plan.toml")) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].split() == ["every", "other", "unit", "zero2", "replicated", "sharded", "sharded"]
    assert lines[2].split() == ["head", "ddp", "replicated", "replicated", "replicated"]


def test_doctor_says_what_each_file_of_ours_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert exit_code("doctor", *arguments) == 0
        return capfd.readouterr().out

    (tmp_path / "cluster.toml").write_text('num_nodes = 2\ndevices_per_node = 8\ndevice = "h100-80gb"\n')
    assert "a cluster for `shardwise plan --cluster`: 2x8xh100-80gb" in said(str(tmp_path / "cluster.toml"))
    (tmp_path / "config.toml").write_text(
        '[task]\nmodel = "gpt-tiny"\ndataset = "stdlib"\n[plan]\nstrategy = "zero3"\nmicro_batch = 2\n'
        '[train]\nsteps = 2\n[run]\nfolder = "."\n'
    )
    assert "every unit  fsdp" in said(str(tmp_path / "config.toml"))
    sample_bench(name="demo").save(tmp_path)
    assert "a bench, demo, of ddp" in said(str(tmp_path / "bench.json"))
    checkpoints = tmp_path / "run" / "checkpoints"
    path = save_one(checkpoints)
    assert "a checkpoint of step 7, saved by 1 ranks" in said(str(path))
    assert "1 checkpoints, the newest of step 7" in said(str(checkpoints))
    (tmp_path / "config.toml").rename(tmp_path / "run" / "config.toml")
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    told = said(str(tmp_path / "run"))
    assert "a run of gpt-tiny under fsdp: metrics of 2 steps, the last 2 with loss 2.5; 1 checkpoints" in told
    (tmp_path / "a.txt").write_text("hello")
    assert exit_code("tokens", str(tmp_path / "a.txt"), "--out", str(tmp_path / "text")) == 0
    assert "a token file: 6 tokens, vocabulary 256" in said(str(tmp_path / "text.bin"))


def test_doctor_names_what_is_damaged_or_nothing_of_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = save_one(tmp_path / "checkpoints")
    weights = next(file for file in path.iterdir() if file.suffix == ".safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert exit_code("doctor", str(path)) == 2
    assert weights.name in capfd.readouterr().err
    (tmp_path / "cluster.toml").write_text('devices_per_node = 8\ndevice = "h1000"\n')
    assert exit_code("doctor", str(tmp_path / "cluster.toml")) == 2
    assert "h1000" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert exit_code("doctor", str(tmp_path / "empty")) == 2
    assert "a folder without a checkpoint, a bench or a run" in capfd.readouterr().err


def save_one(folder: Path) -> Path:
    checkpoints = Checkpoints(folder, asynchronous=False)
    checkpoints.save(nn.Linear(2, 2), step=7)
    checkpoints.close()
    return next(iter(folder.iterdir()))


def test_a_shell_completes_commands_and_options() -> None:
    for typed, found in (("shardwise pl", "plan"), ("shardwise train --ran", "--ranks")):
        words = {"_SHARDWISE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        code = "import sys; sys.argv = ['shardwise']; from shardwise.doors.cli.app import main; main()"
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **words}
        )
        assert found in result.stdout.split(), result.stderr
    # The shell is found among the parents; what follows keeps it from becoming the command itself.
    command = f"{shlex.quote(sys.executable)} -m shardwise --show-completion; true"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "complete" in shown.stdout, shown.stderr


def test_help_shows_one_spelling_of_an_option_and_the_former_one_still_works(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for command in ("train", "bench", "export", "profile", "explain", "calibrate"):
        assert exit_code(command, "--help") == 0
        shown = capfd.readouterr().out
        assert "--ranks" in shown
        assert "--nproc" not in shown
        assert "--strategies" not in shown
    assert exit_code("explain", "zero3", "--nproc=2") == 0
    assert "2 ranks" in capfd.readouterr().out


def test_the_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capfd.readouterr().out == f"shardwise {shardwise.__version__}\n"


def test_the_version_says_that_the_installed_torch_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tested_versions, "version", lambda package: {"torch": "9.1.0"}[package])
    assert exit_code("--version") == 0
    out, err = capfd.readouterr()
    assert out == f"shardwise {shardwise.__version__}\n"
    assert err == tested_versions.untested_torch("9.1.0") + "\n"


def test_models_lists_the_catalogue(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("models") == 0
    out = capfd.readouterr().out
    assert all(name in out for name in CATALOGUE)
    assert "124,439,808" in out
    assert exit_code("models", "--json") == 0
    assert json.loads(capfd.readouterr().out)["llama-3.1-8b"]["num_params"] == 8_030_261_248


def test_models_imports_no_torch() -> None:
    code = (
        "import sys; from shardwise.doors.cli.app import main\n"
        "try: main(['models'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_tokens_writes_a_file_to_train_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "world"}\n')
    (tmp_path / "in" / "c.py").write_text("not taken")
    out = tmp_path / "out"
    assert exit_code("tokens", str(tmp_path / "in"), "--out", str(out)) == 0
    assert "12 tokens in 2 documents, vocabulary 256" in capfd.readouterr().out
    assert exit_code("tokens", str(tmp_path / "in"), "--out", str(out)) == 2
    assert "--force replaces it" in capfd.readouterr().err
    assert exit_code("tokens", str(tmp_path / "in" / "a.txt"), "--out", str(out), "--force") == 0
    assert "6 tokens in 1 document" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "none.txt: there is no such file or folder"),
        (["empty"], "empty: holds no .txt or .jsonl file"),
        (["empty.txt"], "there is not one token to write"),
        (["a.txt", "--end-token", "x"], "--end-token goes with --tokenizer"),
        (["a.txt", "--tokenizer", "none.json"], "none.json: there is no such tokenizer.json"),
        (["bad.txt"], "bad.txt: is not text in UTF-8"),
    ],
)
def test_tokens_refuses_in_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("empty.txt").touch()
    Path("a.txt").write_text("a")
    Path("bad.txt").write_bytes(b"\xff")
    before = sorted(tmp_path.iterdir())
    assert exit_code("tokens", *arguments, "--out", "out") == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_command_or_option_is_exit_code_2() -> None:
    assert run("trian").returncode == 2
    assert run("models", "--jsn").returncode == 2


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    shell = f"{sys.executable} -m shardwise models | true"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


def test_every_command_and_every_option_of_plan_has_a_group_and_every_command_an_example(
    capfd: pytest.CaptureFixture[str],
) -> None:
    commands = typer.main.get_command(app).commands
    assert {name for group in COMMANDS.values() for name in group} == set(commands)
    shown = {option for one in commands["plan"].params for option in one.opts if option.startswith("--")}
    assert {option for options in OPTIONS["plan"].values() for option in options} == {*shown, "--help"}
    assert exit_code("--help") == 0
    text = capfd.readouterr().out
    at = [text.index(f"\n{group}:\n") for group in COMMANDS]
    assert at == sorted(at)
    for name, command in commands.items():
        assert exit_code(name, "--help") == 0
        text = capfd.readouterr().out
        assert "list[" not in text
        if not hasattr(command, "commands"):
            assert f"Example:\n  shardwise {name}" in text


@pytest.mark.parametrize("columns", ["80", "40"])
def test_devices_cuts_no_name(columns: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert exit_code("devices") == 0
    out = capfd.readouterr().out
    assert "…" not in out
    assert "nvlink-c2c-1" in out


def test_checkpoint_inspect_takes_a_run_folder_as_doctor_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_one(tmp_path / "run" / "checkpoints")
    assert exit_code("checkpoint", "inspect", str(tmp_path / "run")) == 0
    assert "step        7" in capfd.readouterr().out
    assert exit_code("checkpoint", "verify", str(tmp_path / "run")) == 0
