"""The ranks of a job wait for each other at a store, and say who did not come."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from reliability.said import say
from shardwise.base.errors import InvalidJob
from shardwise.comm.groups.agreement import RanksMissing
from shardwise.comm.job.job_environment import Rendezvous
from shardwise.comm.job.rendezvous import wait_for_ranks


def test_names_the_ranks_that_did_not_come(tmp_path: Path) -> None:
    there = Rendezvous(file=str(tmp_path / "store"))
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(wait_for_ranks, there, rank=rank, num_ranks=4, limit_seconds=0.5) for rank in (0, 2)]
    for wait in waits:
        with pytest.raises(RanksMissing, match=r"rank 1, 3 of 4 did not join within 0.5 s"):
            wait.result()


def test_says_that_rank_0_did_not_come(tmp_path: Path) -> None:
    with pytest.raises(RanksMissing, match=r"rank 0 of 2 did not join"):
        wait_for_ranks(Rendezvous(file=str(tmp_path / "store")), rank=1, num_ranks=2, limit_seconds=0.2)


def test_says_where_rank_0_was_not(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(RanksMissing, match=f"rank 0 of 2 was not at 127.0.0.1:{free} within 0.2 s"):
        wait_for_ranks(Rendezvous(address="127.0.0.1", port=free), rank=1, num_ranks=2, limit_seconds=0.2)


@pytest.mark.ledger("silent-listener", outcome="refused")
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("accepts", [True, False])
def test_what_listens_and_never_answers_is_named_within_the_limit(local: bool, accepts: bool) -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as threads:
        port = silent.getsockname()[1]
        taken = threads.submit(silent.accept) if accepts else None
        there = Rendezvous(address="127.0.0.1", port=port, local=local)
        with pytest.raises(
            InvalidJob, match=rf"what listens on 127.0.0.1:{port} did not answer .* MASTER_PORT"
        ) as raised:
            wait_for_ranks(there, rank=1, num_ranks=2, limit_seconds=0.5)
        if taken is not None:
            taken.result()[0].close()
    assert "\n" not in say(str(raised.value).replace(str(port), "29500"))
    # A process group waits for half an hour.
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("interface", ["", "127.0.0.1"])
@pytest.mark.parametrize("local", [True, False])
def test_says_that_the_port_is_taken(interface: str, local: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((interface, 0)) as taken:
        port = taken.getsockname()[1]
        there = Rendezvous(address="127.0.0.1", port=port, serves=True, local=local)
        with pytest.raises(InvalidJob, match=f"rank 0 cannot listen on 127.0.0.1:{port}: set MASTER_PORT"):
            wait_for_ranks(there, rank=0, num_ranks=2, limit_seconds=0.2)


@pytest.mark.parametrize("local", [True, False])
def test_a_process_can_join_again_while_its_first_store_is_held(local: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    there = Rendezvous(address="127.0.0.1", port=port, serves=True, local=local)
    stores = [wait_for_ranks(there, rank=0, num_ranks=1, limit_seconds=5) for _ in range(2)]
    stores[0].set("value", "of the first")
    assert not stores[1].check(["value"])


@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_are_not_fooled_by_what_those_before_them_left_in_the_store(tmp_path: Path, late: int) -> None:
    """torchrun keeps its store over restarts; here rank `late` comes after the others have looked around."""
    there = Rendezvous(file=str(tmp_path / "store"))
    # Whoever opens the file last would delete it.
    keeps = FileStore(there.file, 100)
    keeps.set("kept", "")
    values = []
    for turn in range(3):
        pause = threading.Event()

        def come(rank: int, pause: threading.Event = pause, turn: int = turn) -> str:
            if rank == late:
                pause.wait(0.15)
            store = wait_for_ranks(there, rank=rank, num_ranks=3, limit_seconds=5)
            if rank == 0:
                store.set("value", str(turn))
            return store.get("value").decode()

        with ThreadPoolExecutor() as threads:
            values.append(list(threads.map(come, range(3))))
    assert values == [["0"] * 3, ["1"] * 3, ["2"] * 3]


def test_a_rank_that_does_not_come_back_is_named_although_its_old_name_is_in_the_store(tmp_path: Path) -> None:
    there = Rendezvous(file=str(tmp_path / "store"))
    keeps = FileStore(there.file, 100)
    keeps.set("kept", "")
    with ThreadPoolExecutor(max_workers=8) as threads:
        wait = partial(wait_for_ranks, there, num_ranks=8)
        list(threads.map(lambda rank: wait(rank=rank, limit_seconds=20), range(8)))
        again = [threads.submit(wait, rank=rank, limit_seconds=1.5) for rank in range(8) if rank != 3]
    for one in again:
        with pytest.raises(RanksMissing, match=r"^rank 3 of 8 did not join"):
            one.result()
