"""`prepare` joins the job that its environment describes, whoever started the ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ports import free_port
from prepares import take_step
from ranks import run_ranks
from torch import nn

from shardwise import Plan, prepare
from shardwise.base.errors import InvalidJob

PREPARES = Path(__file__).parent / "prepares.py"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def check_one_job(found: list[dict[str, Any]]) -> None:
    assert [(rank["rank"], rank["num_ranks"]) for rank in found] == [(0, 2), (1, 2)]
    # They began with different weights and saw different data.
    assert found[0]["weights"] == found[1]["weights"]
    assert all(rank["listening"] for rank in found), "Gloo listens somewhere"
    assert {address for rank in found for address, _ in rank["listening"]} <= LOOPBACK


def srun_variables() -> dict[str, str]:
    return {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1"}


@pytest.mark.whole
def test_under_srun_tasks_that_are_processes_of_their_own_from_start_to_end_are_one_job(tmp_path: Path) -> None:
    step = srun_variables()
    tasks = [
        subprocess.Popen(
            [sys.executable, PREPARES, tmp_path, "shardwise", str(rank)],
            env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [task.communicate(timeout=60)[1] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(errors)
    check_one_job([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)])


def started_with(rank: int, variables: dict[str, str], engine: str) -> dict[str, Any]:
    """A rank of the pool, which leaves its job, as one that was started with these variables."""
    dist.destroy_process_group()
    del os.environ["GLOO_SOCKET_IFNAME"]
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    return take_step(engine, rank)


def test_under_srun_the_tasks_are_one_job() -> None:
    variables = srun_variables() | {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"}
    check_one_job(run_ranks(started_with, num_ranks=2, args=(variables, "shardwise")))


def test_under_torchruns_variables_the_ranks_are_one_job_on_torchs_engine_too() -> None:
    variables = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    check_one_job(run_ranks(started_with, num_ranks=2, args=(variables, "torch")))


@pytest.mark.ledger("ipv6-address", outcome="right")
@pytest.mark.parametrize("address", ["::1", "[::1]"])
@pytest.mark.parametrize("num_nodes", ["1", "0"])
def test_the_ranks_meet_at_an_ipv6_address(address: str, num_nodes: str) -> None:
    variables = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": num_nodes}
    variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port("::1")), "GLOO_SOCKET_IFNAME": "lo"}
    found = run_ranks(started_with, num_ranks=2, args=(variables, "shardwise"))
    assert found[0]["weights"] == found[1]["weights"]
    if num_nodes == "1":
        check_one_job(found)


def test_without_a_launcher_it_is_a_job_of_one_rank() -> None:
    (alone,) = run_ranks(started_with, num_ranks=1, args=({}, "shardwise"))
    assert (alone["rank"], alone["num_ranks"]) == (0, 1)


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_variables_that_cannot_be_are_one_line_and_leave_nothing_behind(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidJob, match="MASTER_ADDR is not set") as raised:
        prepare(nn.Linear(2, 2), None, Plan(engine=engine))
    assert "\n" not in str(raised.value)
    assert not dist.is_initialized()
