"""A process is a rank of its job in a block, and leaves nothing behind."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.job.job_environment import is_rank
from shardwise.comm.job.join import NoDevice, join_job, joined

CPU = torch.device("cpu")


def test_alone_is_a_job_of_one_that_leaves_no_group() -> None:
    assert not is_rank()
    with joined(CPU, limit_seconds=5) as place:
        assert (place.rank, place.num_ranks, place.restarts) == (0, 1, 0)
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_leaves_the_group_after_an_error_too() -> None:
    with pytest.raises(ValueError, match="inside"), joined(CPU, limit_seconds=5):
        raise ValueError("inside")
    assert not dist.is_initialized()


def test_uses_a_group_that_is_there_and_leaves_it_alone() -> None:
    with joined(CPU, limit_seconds=5):
        group = dist.group.WORLD
        with joined(CPU, limit_seconds=5) as place:
            assert place.num_ranks == 1
            assert dist.group.WORLD is group
        assert dist.group.WORLD is group


def test_an_error_of_a_rank_is_told_while_the_group_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, bool]] = []

    def on_error(error: BaseException, *, rank: int) -> None:
        told.append((str(error), rank, dist.is_initialized()))

    with pytest.raises(ValueError, match="alone"), joined(CPU, limit_seconds=5, on_error=on_error):
        raise ValueError("alone")
    assert told == [], "no launcher started this process: nobody is to be told"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="inside"), joined(CPU, limit_seconds=5, on_error=on_error):
        raise ValueError("inside")
    assert told == [("inside", 0, True)]


class TestDevice:
    """Of a rank in a group that is there, on a machine with GPUs (pretended: none is touched)."""

    @pytest.fixture(autouse=True)
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
        chosen: list[torch.device] = []
        for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        with joined(CPU, limit_seconds=5):
            yield chosen

    def test_is_the_one_of_the_local_rank(self, gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
            monkeypatch.setenv(name, value)
        assert join_job() == join_job(torch.device("cuda")) == torch.device("cuda", 3)
        assert gpus == [torch.device("cuda", 3)] * 2

    def test_is_the_current_one_where_no_launcher_tells(self) -> None:
        assert join_job() == torch.device("cuda", 2)

    def test_is_the_only_one_that_slurm_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        for name, value in {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}.items():
            monkeypatch.setenv(name, value)
        assert join_job() == torch.device("cuda", 0)

    def test_is_what_is_asked_for_whatever_the_variables_say(
        self, gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"RANK": "no", "WORLD_SIZE": "numbers"}.items():
            monkeypatch.setenv(name, value)
        assert [join_job(CPU), join_job(torch.device("cuda", 1))] == [CPU, torch.device("cuda", 1)]
        assert gpus == []

    def test_that_is_not_there_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(NoDevice, match="rank 5 would use cuda:5, but torch finds 4 GPUs on its machine"):
            join_job()
