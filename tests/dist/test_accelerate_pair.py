"""accelerate/train.py and scripts/benchmark.sh in real processes, on two CPU ranks: DDP, FSDP, and the traps."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

ROOT = Path(__file__).parents[2]
TRAIN = "accelerate/train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUM_SAMPLES = 8
OPTIONS = ("--batch-size", 2, "--epochs", 2)

# One torchrun for three trainings, since importing torch takes longer than all of them: under each config, with what
# `accelerate launch` exports for it. All train on a few digits only; which of them a rank reads under DDP is noted.
SPY = f"""
import json, os, runpy, sys
from pathlib import Path
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from shardwise.models.data.images import Digits

seen, make, read = [], Digits.__init__, Digits.__getitem__

def make_small(self, *, evaluation=False):
    make(self, evaluation=evaluation)
    self.evaluation = evaluation
    self.images, self.labels = self.images[:{NUM_SAMPLES}], self.labels[:{NUM_SAMPLES}]

def read_noted(self, index):
    if not self.evaluation:
        seen.append(index)
    return read(self, index)

Digits.__init__, Digits.__getitem__ = make_small, read_noted
folder = Path(sys.argv.pop(1))
main = runpy.run_path("{TRAIN}", run_name="train")["main"]
for name, environment in json.loads((folder / "environments.json").read_text()).items():
    # A group may not meet where one met before: it would read the addresses that the other left.
    place = f"file://{{folder}}/{{name}}-meeting"
    dist.init_process_group("gloo", init_method=place, rank=int(os.environ["RANK"]), world_size=2)
    os.environ.update(environment)
    sys.argv[-1] = str(folder / f"{{name}}.json")
    main()
    (folder / f"seen-{{name}}-{{os.environ['RANK']}}.json").write_text(json.dumps(seen))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
"""

pytestmark = pytest.mark.timeout(300)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the root of the repository, on the loopback interface alone and as if there were no GPU."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        # With the launcher its ranks, which would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done after 280 s: {process.communicate()[1]}") from None
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def launch_arguments(config: Path) -> Any:
    """What `accelerate launch` makes of a config file."""
    command = ["--config_file", str(config), "--main_process_port", "0", TRAIN]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]


def launch_environment(name: str) -> dict[str, str]:
    """What `accelerate launch` exports for a config of the pair."""
    return prepare_multi_gpu_env(launch_arguments(ROOT / "accelerate" / f"config_{name}.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two epochs of DDP, of FSDP and of FSDP2, on two processes that torchrun starts."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "spy.py").write_text(SPY)
    environments = {
        name: {
            key: value for key, value in launch_environment(name).items() if key.startswith(("ACCELERATE_", "FSDP_"))
        }
        for name in ("ddp", "fsdp", "fsdp2")
    }
    (folder / "environments.json").write_text(json.dumps(environments))
    done = run(*TORCHRUN, folder / "spy.py", folder, *OPTIONS, "--json", folder / "ddp.json")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def ddp(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "ddp.json").read_text())
    return result


@pytest.mark.whole
def test_ddp_runs_on_two_processes_and_reports_what_it_did(ddp: dict[str, Any]) -> None:
    assert (ddp["model"], ddp["mixed_precision"]) == ("vit-digits", "no")
    assert (ddp["distributed_type"], ddp["num_processes"]) == ("MULTI_CPU", 2)
    assert len(ddp["losses"]) == 2 * NUM_SAMPLES // 4
    assert ddp["samples_per_s"] > 0
    assert 0 <= ddp["accuracy"] <= 1
    assert [rank["rank"] for rank in ddp["ranks"]] == [0, 1]
    # Parameters, gradients, the copies of gradients in buckets and AdamW's two moments, in float32.
    assert all(rank["peak_allocated_bytes"] >= 20 * ddp["num_params"] for rank in ddp["ranks"])


@pytest.mark.whole
def test_ddp_ranks_read_disjoint_samples_that_cover_the_dataset(ddp: dict[str, Any], folder: Path) -> None:
    seen = [json.loads((folder / f"seen-ddp-{rank}.json").read_text()) for rank in (0, 1)]
    half = NUM_SAMPLES // 2
    for epoch in (0, 1):
        ours, theirs = (samples[epoch * half : (epoch + 1) * half] for samples in seen)
        assert not set(ours) & set(theirs)
        assert sorted(ours + theirs) == list(range(NUM_SAMPLES))
    assert seen[0][:half] != seen[0][half:]


@pytest.mark.whole
def test_ddp_ranks_end_with_the_same_weights(ddp: dict[str, Any]) -> None:
    ours, theirs = (rank["weights_sha256"] for rank in ddp["ranks"])
    assert ours == theirs


@pytest.mark.whole
@pytest.mark.parametrize("version", ["fsdp", "fsdp2"])
def test_fsdp_trains_as_ddp_does(version: str, ddp: dict[str, Any], folder: Path) -> None:
    fsdp = json.loads((folder / f"{version}.json").read_text())
    assert (fsdp["distributed_type"], fsdp["num_processes"]) == ("FSDP", 2)
    # Half of the parameters, the gradients and AdamW's two moments. What Gloo's threads free unseen adds to it.
    assert all(rank["peak_allocated_bytes"] >= 8 * fsdp["num_params"] for rank in fsdp["ranks"])
    assert all(rank["weights_sha256"] is None for rank in fsdp["ranks"])
    # The sum of two ranks' gradients is the same in any order; the rest is how a CPU cuts its vectors.
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert fsdp["accuracy"] == ddp["accuracy"]


def test_the_benchmark_launches_both_configs_on_cpu_ranks_and_compares_them() -> None:
    sizes = {"MODEL_SIZE": "digits", "BATCH_SIZE": "2", "MAX_STEPS": "4"}
    done = run("bash", "scripts/benchmark.sh", PYTHON=sys.executable, **sizes)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("no GPU here: vit-digits on 2 CPU ranks with Gloo, float32 in place of fp16") == 2
    *_, head, ddp, fsdp, note = lines
    assert "memory per CPU rank" in head
    assert re.fullmatch(r"ddp +[\d.]+ MiB +[\d.]+ +–", ddp)
    assert re.fullmatch(r"fsdp +[\d.]+ MiB +[\d.]+ +-?\d+%", fsdp)
    assert note == "On CPU ranks: memory is the peak of all tensors, and samples/s is not a speed claim."


@pytest.mark.whole
def test_torchrun_that_would_turn_fsdp_into_ddp_stops() -> None:
    done = run(*TORCHRUN, TRAIN, "--config", "accelerate/config_fsdp.yaml")
    assert done.returncode != 0
    (line,) = lines_of(done)
    assert "asks for distributed_type FSDP, Accelerate runs MULTI_CPU: start it with accelerate launch" in line
    assert line.endswith(f"--config_file accelerate/config_fsdp.yaml {TRAIN}")
    # The launcher has an exit code of its own, and reports the script's.
    assert "exitcode  : 2" in done.stderr


def test_one_process_of_several_cpu_processes_stops_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    # This is what `accelerate launch` runs for MULTI_CPU, without the launcher.
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}))
    command, environment = prepare_simple_launcher_cmd_env(launch_arguments(config))
    done = run(*command, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == len(lines_of(done)) == 1
    assert "asks for num_processes 2, Accelerate runs 1: start it with accelerate launch --config_file" in done.stderr


def test_one_process_that_was_to_run_fsdp_stops_with_one_line_and_exit_code_2() -> None:
    done = run(sys.executable, TRAIN, **launch_environment("fsdp"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == len(lines_of(done)) == 1
    assert "asks for distributed_type FSDP, Accelerate runs NO: start it with accelerate launch" in done.stderr
    assert "--config_file accelerate/config_fsdp.yaml" in done.stderr


def test_a_peak_on_a_cpu_without_enough_warm_up_steps_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    train = runpy.run_path(str(ROOT / TRAIN), run_name="train")
    with train["Memory"](torch.device("cpu"), warmup_steps=2) as memory:
        memory.end_step(2)
    rank = {"rank": 0, "device": "cpu", "peak_allocated_bytes": max(memory.peak_bytes.values(), default=None)}
    train["report"]({"samples_per_s": None, "ranks": [rank]}, json_file=None)
    assert capsys.readouterr().out == "peak of rank 0: not measured: needs --warmup-steps 3\n"


def test_memory_on_a_cpu_is_the_peak_of_the_first_two_steps() -> None:
    with runpy.run_path(str(ROOT / TRAIN), run_name="train")["Memory"](torch.device("cpu"), warmup_steps=3) as memory:
        for step, num_bytes in enumerate((1000, 3000, 9000), start=1):
            _ = torch.empty(num_bytes, dtype=torch.uint8)
            del _
            memory.end_step(step)
    assert memory.peak_bytes == {"recorded": 3000}
