"""Who started this process, and how the ranks find each other."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardwise.comm.agreement import RanksMissing
from shardwise.launch.join import STORE, InvalidJob, Start, is_rank, joined, meet, start_of

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


class TestStartOf:
    def test_torchrun(self) -> None:
        start = start_of(TORCHRUN)
        assert (start.rank, start.local_rank, start.num_ranks, start.num_nodes) == (5, 1, 8, 2)
        assert (start.address, start.port, start.serves, start.restarts) == ("10.0.0.1", 29500, False, 3)

    def test_rank_0_serves_the_store_where_no_agent_does(self) -> None:
        assert start_of(COMMAND).serves
        assert not start_of(COMMAND | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).serves

    def test_our_launcher_names_a_file_and_no_address(self) -> None:
        start = start_of({"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", STORE: "/somewhere"})
        assert (start.file, start.address, start.num_nodes) == ("/somewhere", "", 1)

    def test_slurm(self) -> None:
        start = start_of(SLURM)
        assert (start.rank, start.local_rank, start.num_ranks, start.num_nodes) == (3, 1, 4, 2)
        assert (start.address, start.serves) == ("node07", False)
        assert start_of(SLURM | {"SLURM_PROCID": "0"}).serves

    def test_slurm_jobs_and_steps_have_ports_of_their_own_unless_one_is_given(self) -> None:
        ports = {start_of(SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(5000, 5100)}
        ports |= {start_of(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(20)}
        assert len(ports) == 120
        assert all(1024 < port < 32768 for port in ports)
        assert start_of(SLURM | {"MASTER_PORT": "777", "MASTER_ADDR": "head"}).port == 777

    def test_slurm_on_one_node_meets_on_loopback(self) -> None:
        assert start_of(SLURM | {"SLURM_NNODES": "1"}).address == "127.0.0.1"

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
    def test_slurms_first_node_is_where_rank_0_is(self, nodes: str, first: str) -> None:
        assert start_of(SLURM | {"SLURM_JOB_NODELIST": nodes}).address == first

    def test_nobody_makes_a_job_of_one(self) -> None:
        assert start_of({}) == Start()
        assert start_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Start()

    def test_a_variable_that_is_missing_or_no_number_is_named(self) -> None:
        without = {key: value for key, value in COMMAND.items() if key != "MASTER_PORT"}
        with pytest.raises(InvalidJob, match="MASTER_PORT is not set"):
            start_of(without)
        with pytest.raises(InvalidJob, match="'x'"):
            start_of(COMMAND | {"RANK": "x"})


class TestJoined:
    def test_alone_is_a_job_of_one_that_leaves_no_group(self) -> None:
        assert not is_rank()
        with joined(torch.device("cpu"), limit_seconds=5) as place:
            assert (place.rank, place.num_ranks, place.restarts) == (0, 1, 0)
            assert dist.get_world_size() == 1
        assert not dist.is_initialized()

    def test_leaves_the_group_after_an_error_too(self) -> None:
        with pytest.raises(ValueError, match="inside"), joined(torch.device("cpu"), limit_seconds=5):
            raise ValueError("inside")
        assert not dist.is_initialized()

    def test_uses_a_group_that_is_there_and_leaves_it_alone(self) -> None:
        with joined(torch.device("cpu"), limit_seconds=5):
            group = dist.group.WORLD
            with joined(torch.device("cpu"), limit_seconds=5) as place:
                assert place.num_ranks == 1
                assert dist.group.WORLD is group
            assert dist.group.WORLD is group


class TestMeet:
    def test_names_the_ranks_that_did_not_come(self, tmp_path: Path) -> None:
        here = [Start(rank=rank, num_ranks=4, file=str(tmp_path / "store")) for rank in (0, 2)]
        with ThreadPoolExecutor() as threads:
            meetings = [threads.submit(meet, start, limit_seconds=0.5) for start in here]
        for meeting in meetings:
            with pytest.raises(RanksMissing, match=r"rank 1, 3 of 4 did not join within 0.5 s"):
                meeting.result()

    def test_says_that_rank_0_did_not_come(self, tmp_path: Path) -> None:
        with pytest.raises(RanksMissing, match=r"rank 0 of 2 did not join"):
            meet(Start(rank=1, num_ranks=2, file=str(tmp_path / "store")), limit_seconds=0.2)

    def test_says_where_rank_0_was_not(self, capfd: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            free = taken.getsockname()[1]
        with pytest.raises(RanksMissing, match=f"rank 0 of 2 was not at 127.0.0.1:{free} within 0.2 s"):
            meet(Start(rank=1, num_ranks=2, address="127.0.0.1", port=free), limit_seconds=0.2)

    @pytest.mark.parametrize("num_nodes", [1, 2])
    def test_says_that_the_port_is_taken(self, num_nodes: int, capfd: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
            start = Start(num_ranks=2, num_nodes=num_nodes, address="127.0.0.1", port=port, serves=True)
            with pytest.raises(InvalidJob, match=f"rank 0 cannot listen on 127.0.0.1:{port}: set MASTER_PORT"):
                meet(start, limit_seconds=0.2)

    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_ranks_are_not_fooled_by_what_those_before_them_left_in_the_store(self, tmp_path: Path, late: int) -> None:
        """torchrun keeps its store over restarts; here rank `late` comes after the others have looked around."""
        starts = [Start(rank=rank, num_ranks=3, file=str(tmp_path / "store")) for rank in range(3)]
        # Whoever opens the file last would delete it.
        keeps = FileStore(str(tmp_path / "store"), 100)
        keeps.set("kept", "")
        values = []
        for turn in range(3):
            pause = threading.Event()

            def come(start: Start, pause: threading.Event = pause, turn: int = turn) -> str:
                if start.rank == late:
                    pause.wait(0.15)
                store = meet(start, limit_seconds=5)
                if start.rank == 0:
                    store.set("value", str(turn))
                return store.get("value").decode()

            with ThreadPoolExecutor() as threads:
                values.append(list(threads.map(come, starts)))
        assert values == [["0"] * 3, ["1"] * 3, ["2"] * 3]
