"""torchrun over two hosts, which are network namespaces of this machine."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hosts import Host
from ranks import run_ranks
from test_launch_train import CONFIG
from train_tasks import trained

from shardwise.training.config.config import TrainConfig

HERE = Path(__file__).parent


def run_on(hosts: tuple[Host, Host], *program: object, max_restarts: int = 0) -> None:
    """torchrun with one rank a host, meeting at the first; both must end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7"]
    # Nobody else is in these namespaces, so that any port is free.
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400", f"--max-restarts={max_restarts}"]
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    processes = [
        subprocess.Popen(
            host.command(*torchrun, *program),
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for host in hosts
    ]
    try:
        written = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(written)


@pytest.mark.whole
def test_ranks_on_two_hosts_join_also_after_a_restart(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Rank 1 kills itself in the first start; the store of torchrun's agents still holds all that it wrote."""
    run_on(hosts, HERE / "joins.py", tmp_path, 1, max_restarts=2)
    assert (tmp_path / "died").exists()
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(rank["num_ranks"], rank["total"]) for rank in found] == [(2, 3), (2, 3)]


def trained_here(rank: int, asked: TrainConfig) -> None:
    """With oneDNN, as in the processes of torchrun."""
    with torch.backends.mkldnn.flags(enabled=True):
        trained(rank, asked)


@pytest.mark.whole
def test_training_on_two_hosts_gives_the_losses_of_one(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    config, one, two = (tmp_path / name for name in ("config.toml", "one", "two"))
    config.write_text(CONFIG)
    # Not --run: torchrun takes any option that begins like one of its own.
    run_on(hosts, "-m", "shardwise", "train", config, "--set", f"run.folder={two}")
    told = tomllib.loads(CONFIG)
    asked = TrainConfig.from_dict(told | {"run": {**told["run"], "folder": str(one)}})
    run_ranks(trained_here, num_ranks=2, args=(asked,))
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (one, two)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
