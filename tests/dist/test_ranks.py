"""The helper that starts ranks keeps what it promises; every other distributed test rests on it."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks, world_group
from torch import Tensor

from reliability.said import say, take


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A class of this module, to be sent to the ranks and back."""

    rank: int
    tensor: Tensor


def sum_of_ranks(rank: int, base: float) -> Tensor:
    total = torch.tensor([base + rank], dtype=torch.bfloat16)
    dist.all_reduce(total)
    return total


def echo(rank: int, message: Message) -> Message:
    return Message(rank=rank, tensor=message.tensor * rank)


def raise_on_rank_one(rank: int) -> None:
    if rank == 1:
        print("rank one has something to say")
        raise ValueError("rank one gives up")
    dist.barrier()


def raise_on_rank_two_first(rank: int) -> None:
    dist.barrier()
    if rank != 2:
        time.sleep(0.5)
    raise ValueError(f"rank {rank} gives up")


def die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on_rank_one(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def skip(rank: int) -> None:
    pytest.skip("not today")


def random_numbers(rank: int) -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def make_groups(rank: int) -> int:
    for _ in range(3):
        group = dist.new_group()
        dist.barrier(group=group)
    return len(dist.distributed_c10d._world.pg_map)


def what_there_is(rank: int) -> tuple[int, int, int]:
    """Groups, threads of the process, open files."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    return num_groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def process(rank: int) -> int:
    return os.getpid()


def change_the_process(rank: int, what: str) -> None:
    if what == "environment":
        os.environ["A_BODY_WAS_HERE"] = "1"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    elif what == "default group":
        dist.destroy_process_group()


def one_process_each(rank: int) -> tuple[int, int, int]:
    group = world_group()
    return group.index, group.size, torch.get_num_threads()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_back_by_rank(num_ranks: int) -> None:
    assert run_ranks(one_process_each, num_ranks=num_ranks) == [(rank, num_ranks, 1) for rank in range(num_ranks)]
    assert len(set(run_ranks(process, num_ranks=num_ranks)) - {os.getpid()}) == num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_can_communicate(num_ranks: int) -> None:
    total = num_ranks * 10 + sum(range(num_ranks))
    for result in run_ranks(sum_of_ranks, num_ranks=num_ranks, args=(10.0,)):
        assert result.item() == total


def test_classes_of_the_test_module_travel_both_ways() -> None:
    sent = Message(rank=-1, tensor=torch.arange(3))
    for rank, message in enumerate(run_ranks(echo, num_ranks=2, args=(sent,))):
        assert isinstance(message, Message)
        assert (message.rank, message.tensor.tolist()) == (rank, [0, rank, 2 * rank])


def test_processes_are_kept_between_calls() -> None:
    assert run_ranks(process, num_ranks=2) == run_ranks(process, num_ranks=2)


def test_a_raise_is_told_at_once_while_the_others_wait_in_a_collective() -> None:
    run_ranks(process, num_ranks=3)
    start = time.perf_counter()
    with pytest.raises(RankFailed, match="(?s)rank 1 of 3.*ValueError: rank one gives up.*something to say"):
        run_ranks(raise_on_rank_one, num_ranks=3)
    assert time.perf_counter() - start < 30


def test_of_several_failures_the_first_in_time_is_told() -> None:
    with pytest.raises(RankFailed, match="ValueError: rank 2 gives up"):
        run_ranks(raise_on_rank_two_first, num_ranks=3)


def test_a_process_that_dies_is_told_by_its_rank() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 3: the process ended with exit code -9"):
        run_ranks(die_on_rank_one, num_ranks=3)


def test_a_hang_is_cut_and_names_the_ranks_and_their_place() -> None:
    run_ranks(process, num_ranks=2)
    start = time.perf_counter()
    message = r"(?s)ranks \[1\] of 2 did not come back within 0.5 s.*in sleep_on_rank_one"
    with pytest.raises(RankFailed, match=message):
        run_ranks(sleep_on_rank_one, num_ranks=2, timeout_seconds=0.5)
    assert time.perf_counter() - start < 30


def test_a_skip_inside_a_body_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="Skipped: not today"):
        run_ranks(skip, num_ranks=2)


def test_a_pool_works_again_after_a_failure_and_the_old_processes_are_gone() -> None:
    old = run_ranks(process, num_ranks=2)
    with pytest.raises(RankFailed):
        run_ranks(raise_on_rank_one, num_ranks=2)
    new = run_ranks(process, num_ranks=2)
    assert not set(old) & set(new)
    assert not any(Path(f"/proc/{pid}").exists() for pid in old)
    assert [result.item() for result in run_ranks(sum_of_ranks, num_ranks=2, args=(0.0,))] == [1.0, 1.0]


def test_random_numbers_start_anew_for_each_body() -> None:
    first, second = (run_ranks(random_numbers, num_ranks=2) for _ in range(2))
    assert first == second
    assert first[0] == first[1]


def test_groups_that_a_body_made_are_destroyed_with_their_threads_and_connections() -> None:
    run_ranks(make_groups, num_ranks=3)
    before = run_ranks(what_there_is, num_ranks=3)
    assert run_ranks(make_groups, num_ranks=3) == [4, 4, 4]
    # A thread that has ended is listed for a moment longer.
    deadline = time.monotonic() + 10
    while (after := run_ranks(what_there_is, num_ranks=3)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after == before
    assert [num_groups for num_groups, _, _ in before] == [1, 1, 1]


def says(rank: int, speaker: int) -> None:
    if rank >= speaker:
        say(f"rank {rank} of {dist.get_world_size()}")


@pytest.mark.parametrize("speaker", [0, 1])
def test_what_the_first_rank_that_speaks_says_comes_to_the_test(speaker: int) -> None:
    run_ranks(says, num_ranks=2, args=(speaker,))
    assert take() == [f"rank {speaker} of 2"]


@pytest.mark.parametrize("what", ["environment", "dtype", "thread", "default group"])
def test_a_worker_that_a_body_changed_is_not_used_again(what: str) -> None:
    old = run_ranks(process, num_ranks=2)
    run_ranks(change_the_process, num_ranks=2, args=(what,))
    assert not set(old) & set(run_ranks(process, num_ranks=2))


def test_a_body_must_be_a_function_of_a_module() -> None:
    with pytest.raises(ValueError, match="a body must be a function of a module"):
        run_ranks(lambda rank: rank, num_ranks=2)


_KILLED_IN_MID_BODY = """
import sys
sys.path[:0] = {path!r}
import ranks, test_ranks
ranks._PRELOAD = ("torch",)
if __name__ == "__main__":
    print(*ranks.run_ranks(test_ranks.process, num_ranks=2), flush=True)
    ranks.run_ranks(test_ranks.sleep_on_rank_one, num_ranks=2)
"""


def test_no_worker_outlives_a_test_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    folder = str(Path(ranks.__file__).parent)
    script.write_text(_KILLED_IN_MID_BODY.format(path=[folder, str(Path(folder).parent)]))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as test:
        assert test.stdout is not None
        pids = [int(pid) for pid in test.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)  # the second body is under way
        test.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
