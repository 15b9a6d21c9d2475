"""How long the watchdog has patience with a rank."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shardwise.comm.groups.rank_progress import RankProgress
from shardwise.comm.watch import pace
from shardwise.comm.watch.pace import Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A time that stands still, and a rank that has come nowhere."""
    now = SimpleNamespace(seconds=100.0, progress=RankProgress())
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(pace, "PROGRESS", now.progress)
    return now


def steps(clock: SimpleNamespace, watched: Pace, *seconds: float) -> None:
    for each in seconds:
        clock.seconds += each
        clock.progress.end_step()
        watched.note()


def test_the_first_steps_have_four_times_the_limit(clock: SimpleNamespace) -> None:
    watched = Pace()
    assert watched.limit(300, most_seconds=1e9) == (1200, "four times as long until the second step is done")
    steps(clock, watched, 50, 1)
    assert watched.limit(300, most_seconds=1e9) == (300, "")


def test_slow_steps_make_the_limit_longer_until_they_are_long_past(clock: SimpleNamespace) -> None:
    watched = Pace()
    steps(clock, watched, 900, 1, 200)
    assert watched.limit(300, most_seconds=1e9) == (600, "three times the slowest of the last steps")
    steps(clock, watched, *[1] * 8)
    assert watched.limit(300, most_seconds=1e9) == (300, "")


def test_the_time_out_of_the_group_is_the_last_word(clock: SimpleNamespace) -> None:
    assert Pace().limit(300, most_seconds=27) == (27, "just below the time-out of the process group")


def test_a_rank_is_idle_since_its_last_collective(clock: SimpleNamespace) -> None:
    watched = Pace()
    clock.progress.count += 1
    watched.note()
    clock.seconds += 7
    watched.note()
    assert watched.idle_seconds == 7
    clock.progress.evaluated += 1
    watched.note()
    assert watched.idle_seconds == 0
