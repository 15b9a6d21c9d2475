"""A process is a rank of its job in a block, and leaves nothing behind."""

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.job_environment import is_rank
from shardwise.comm.join import joined

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
