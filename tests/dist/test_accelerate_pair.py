"""accelerate/train.py in real processes: DDP on two CPUs, FSDP as far as a CPU goes, and the traps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

ROOT = Path(__file__).parents[2]
TRAIN = "accelerate/train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
NUM_SAMPLES = 8
OPTIONS = ("--batch-size", 2, "--epochs", 2, "--warmup-steps", 1)

# One torchrun for three trainings, since importing torch takes longer than all of them: DDP by the script as it
# is, then FSDP of both versions. Accelerate offers FSDP on GPUs only, though torch's own runs on CPUs as well: so
# for these its ranks are told that they are GPUs, and every other line is the real one. All train on a few
# digits only; which of them a rank reads under DDP is noted.
SPY = f"""
import json, os, runpy, sys
from pathlib import Path
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from shardwise.data.images import Digits

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
main()
(folder / f"seen-{{os.environ['RANK']}}.json").write_text(json.dumps(seen))

PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
main.__globals__["start_accelerator"] = lambda config: Accelerator(kwargs_handlers=[meeting])
del os.environ["ACCELERATE_USE_CPU"]
for version, environment in json.loads((folder / "environments.json").read_text()).items():
    # A group may not meet where one met before: it would read the addresses that the other left.
    place = f"file://{{folder}}/{{version}}-meeting?rank={{os.environ['RANK']}}&world_size=2"
    meeting = InitProcessGroupKwargs(backend=None, init_method=place)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(environment)
    sys.argv[-1] = str(folder / f"{{version}}.json")
    main()
"""

pytestmark = pytest.mark.timeout(120)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the root of the repository, on the loopback interface alone."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=110)
    except subprocess.TimeoutExpired:
        # With the launcher its ranks, which would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done after 110 s: {process.communicate()[1]}") from None
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def launch_arguments(config: str) -> Any:
    """What `accelerate launch` makes of a config file."""
    command = ["--config_file", str(ROOT / "accelerate" / config), "--main_process_port", "0", TRAIN]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]


def fsdp_environment(config: str) -> dict[str, str]:
    """What `accelerate launch` exports for a config, in float32 and without what needs a GPU."""
    environment = prepare_multi_gpu_env(launch_arguments(config))
    environment |= {"ACCELERATE_MIXED_PRECISION": "no", "FSDP_SYNC_MODULE_STATES": "false"}
    environment |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two epochs of DDP, of FSDP and of FSDP2, on two processes that torchrun starts."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "spy.py").write_text(SPY)
    environments = {name: fsdp_environment(f"config_{name}.yaml") for name in ("fsdp", "fsdp2")}
    (folder / "environments.json").write_text(json.dumps(environments))
    options = ("--config", "accelerate/config_ddp_cpu.yaml", *OPTIONS, "--json", folder / "ddp.json")
    done = run(*TORCHRUN, folder / "spy.py", folder, *options, **ON_CPU)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def ddp(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "ddp.json").read_text())
    return result


@pytest.mark.whole
def test_ddp_runs_on_two_processes_and_reports_what_it_did(ddp: dict[str, Any]) -> None:
    assert (ddp["distributed_type"], ddp["num_processes"]) == ("MULTI_CPU", 2)
    assert len(ddp["losses"]) == 2 * NUM_SAMPLES // 4
    assert ddp["samples_per_s"] > 0
    assert 0 <= ddp["accuracy"] <= 1
    assert [rank["rank"] for rank in ddp["ranks"]] == [0, 1]
    assert all(rank["peak_allocated_bytes"] is None for rank in ddp["ranks"])


@pytest.mark.whole
def test_ddp_ranks_read_disjoint_samples_that_cover_the_dataset(ddp: dict[str, Any], folder: Path) -> None:
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
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
    assert fsdp["distributed_type"] == "FSDP"
    # The sum of two ranks' gradients is the same in any order; the rest is how a CPU cuts its vectors.
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert fsdp["accuracy"] == ddp["accuracy"]


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="the trap of a machine without GPUs")
def test_a_launch_that_would_train_apart_in_each_process_stops() -> None:
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0")
    done = run(*launch, "--config_file", "accelerate/config_ddp.yaml", TRAIN)
    assert done.returncode != 0
    (line,) = lines_of(done)
    assert "asks for num_processes 2, Accelerate runs 1: there is no GPU here" in line
    assert line.endswith(f"ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node 2 {TRAIN}")
    # The launcher has an exit code of its own, and reports the script's.
    assert "exitcode  : 2" in done.stderr


@pytest.mark.whole
def test_torchrun_that_would_turn_fsdp_into_ddp_stops() -> None:
    done = run(*TORCHRUN, TRAIN, "--config", "accelerate/config_fsdp.yaml", **ON_CPU)
    assert done.returncode != 0
    (line,) = lines_of(done)
    assert "asks for distributed_type FSDP, Accelerate runs MULTI_CPU" in line
    assert "exitcode  : 2" in done.stderr


def test_one_process_of_several_cpu_processes_stops_with_one_line_and_exit_code_2() -> None:
    # This is what `accelerate launch` runs for MULTI_CPU, without the launcher.
    command, environment = prepare_simple_launcher_cmd_env(launch_arguments("config_ddp_cpu.yaml"))
    done = run(*command, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == len(lines_of(done)) == 1
    assert "asks for num_processes 2, Accelerate runs 1" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trap of a machine without GPUs")
def test_fsdp_without_gpus_stops_with_one_line_and_exit_code_2() -> None:
    done = run(sys.executable, TRAIN, **prepare_multi_gpu_env(launch_arguments("config_fsdp.yaml")))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == len(lines_of(done)) == 1
    assert "asks for FSDP, which needs GPUs" in done.stderr
