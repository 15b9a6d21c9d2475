"""What the environment says of a process: who started it, and where its ranks meet."""

import pytest

from shardwise.base.errors import InvalidJob
from shardwise.comm.job.job_environment import STORE, Rendezvous, Start, rendezvous_of, start_of, why_alone

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[07-08]",
}
COMMAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def meets(variables: dict[str, str]) -> Rendezvous:
    return rendezvous_of(start_of(variables), variables=variables)


class TestTorchrun:
    def test_says_all(self) -> None:
        start = start_of(TORCHRUN)
        assert (start.launcher, start.restarts) == ("torchrun", 3)
        assert (start.rank, start.local_rank, start.num_ranks, start.num_nodes) == (5, 1, 8, 2)
        assert meets(TORCHRUN) == Rendezvous(address="10.0.0.1", port=29500, local=False)

    def test_rank_0_serves_the_store_where_no_agent_does(self) -> None:
        assert meets(COMMAND).serves
        assert not meets(COMMAND | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).serves

    def test_our_launcher_names_a_file_and_no_address(self) -> None:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", STORE: "/somewhere"}
        assert meets(variables) == Rendezvous(file="/somewhere")
        assert start_of(variables).num_nodes == 1


class TestSlurm:
    def test_says_all(self) -> None:
        start = start_of(SLURM)
        assert start.launcher == "slurm"
        assert (start.rank, start.local_rank, start.num_ranks, start.num_nodes) == (3, 1, 4, 2)
        assert (meets(SLURM).address, meets(SLURM).serves) == ("node07", False)
        assert meets(SLURM | {"SLURM_PROCID": "0"}).serves

    def test_jobs_and_steps_have_ports_of_their_own_unless_one_is_given(self) -> None:
        ports = {meets(SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(5000, 5100)}
        ports |= {meets(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(20)}
        assert len(ports) == 120
        assert all(1024 < port < 32768 for port in ports)
        assert meets(SLURM | {"MASTER_PORT": "777", "MASTER_ADDR": "head"}).port == 777

    def test_one_node_meets_on_loopback(self) -> None:
        assert meets(SLURM | {"SLURM_NNODES": "1"}).address == "127.0.0.1"

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [
            ("node7", "node7"),
            ("a1,a2", "a1"),
            ("gpu-a[01-04,07]", "gpu-a01"),
            ("n[3,5-9],m1", "n3"),
            ("rack[2-3]n[11-14]", "rack2n11"),
            ("n[1-2].cluster", "n1.cluster"),
        ],
    )
    def test_the_first_node_is_where_rank_0_is(self, nodes: str, first: str) -> None:
        assert meets(SLURM | {"SLURM_JOB_NODELIST": nodes}).address == first


def test_no_launcher_makes_a_job_of_one() -> None:
    for variables in ({}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}):
        assert start_of(variables) == Start()
        assert meets(variables) == Rendezvous()


def test_a_variable_that_is_missing_or_no_number_is_named() -> None:
    without = {key: value for key, value in COMMAND.items() if key != "MASTER_PORT"}
    with pytest.raises(InvalidJob, match="MASTER_PORT is not set"):
        meets(without)
    with pytest.raises(InvalidJob, match="RANK is 'x', not a whole number"):
        start_of(COMMAND | {"RANK": "x"})
    with pytest.raises(InvalidJob, match="WORLD_SIZE is not set"):
        start_of({"RANK": "0"})
    with pytest.raises(InvalidJob, match="SLURM_LAUNCH_NODE_IPADDR is not set"):
        meets({key: value for key, value in SLURM.items() if key != "SLURM_JOB_NODELIST"})


def test_a_rank_that_its_job_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidJob, match="RANK and WORLD_SIZE make this process rank 2 of 2"):
        start_of(COMMAND | {"RANK": "2"})
    with pytest.raises(InvalidJob, match="SLURM_PROCID and SLURM_NTASKS make this process rank 4 of 4"):
        start_of(SLURM | {"SLURM_PROCID": "4"})


def test_a_batch_script_that_runs_ranks_without_srun_is_told_at_once() -> None:
    batch = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    with pytest.raises(InvalidJob, match="has 4 tasks, but srun did not start this process: start it with srun"):
        meets(batch)


def test_a_world_size_or_rank_of_the_batch_script_does_not_hide_slurms() -> None:
    for name in ("WORLD_SIZE", "RANK"):
        assert start_of(SLURM | {name: "1"}) == start_of(SLURM)


def test_accelerate_that_started_one_of_several_processes_on_a_cpu_is_said() -> None:
    alone = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    line = why_alone(alone)
    assert line is not None
    assert "torchrun --nproc-per-node" in line
    assert why_alone({"ACCELERATE_USE_CPU": "True"}) is None
    assert why_alone({"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1"}) is None
    assert why_alone({**alone, "RANK": "0", "WORLD_SIZE": "2"}) is None
