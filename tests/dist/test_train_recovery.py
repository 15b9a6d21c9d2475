"""`shardwise train` with checkpoint.memory: a run that is interrupted continues from memory, and ends as one that was not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from train_tasks import assert_same_end, config, curve, lines, trained
from whole import whole

from shardwise.state.checkpoint.folder import checkpoints_in
from shardwise.state.recovery.memory_folder import free_memory
from shardwise.state.recovery.memory_key import key_in
from shardwise.training.config.config import TrainConfig


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for key in filter(None, map(key_in, tmp_path.iterdir())):
        free_memory(key)


def on_ranks(asked: TrainConfig, *, num_ranks: int = 2, crash_after: int | None = None) -> list[Any]:
    # Checkpoints are written by processes of their own, which import torch: on a machine with other work that takes long.
    return run_ranks(trained, num_ranks=num_ranks, args=(asked, crash_after), timeout_seconds=150)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        {"strategy": "fsdp", "accumulate": 2},
        *whole(
            {"strategy": "ddp"}, {"strategy": "zero1", "precision": "fp16"}, {"strategy": "fsdp", "engine": "torch"}
        ),
    ],
    ids=lambda plan: " ".join(map(str, plan.values())),
)
def test_after_two_crashes_without_a_checkpoint_losses_and_weights_are_bit_identical(
    folder: Path, plan: dict[str, Any]
) -> None:
    def asked(name: str, *, memory: bool) -> TrainConfig:
        # Metrics are read when a snapshot is taken as well, so that no step of it is missing.
        return config(
            folder / name,
            plan=plan,
            train={"steps": 12, "log_every": 1},
            checkpoint={"every": 0, "memory": memory, "memory_every": 2},
        )

    on_ranks(asked("whole", memory=False))
    for crash_after in (4, 9):
        on_ranks(asked("crashed", memory=True), crash_after=crash_after)
        assert checkpoints_in(folder / "crashed" / "checkpoints") == []
    seen = on_ranks(asked("crashed", memory=True))[0].seen
    # It began after a snapshot, not at step 1.
    assert 5 <= seen[0].step <= 9
    assert [step for step, _, _ in curve(folder / "crashed")] == list(range(1, 13))
    assert_same_end(folder / "whole", folder / "crashed")
    assert not list(Path("/dev/shm").glob(f"shardwise-{key_in(folder / 'crashed')}"))


@pytest.mark.timeout(300)
def test_no_line_of_the_metrics_is_missing_where_they_are_read_seldom(folder: Path) -> None:
    asked = config(
        folder / "run",
        train={"steps": 10, "log_every": 100},
        checkpoint={"every": 0, "memory": True, "memory_every": 2},
    )
    on_ranks(asked, crash_after=5)
    on_ranks(asked)
    assert [line["step"] for line in lines(folder / "run")] == list(range(1, 11))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, *whole(3)])
def test_it_continues_from_memory_on_another_number_of_ranks(folder: Path, num_ranks: int) -> None:
    asked = config(folder / "run", train={"steps": 8}, checkpoint={"every": 0, "memory": True, "memory_every": 2})
    on_ranks(asked, crash_after=6)
    ended = on_ranks(asked, num_ranks=num_ranks)[0]
    assert ended.seen[0].step >= 4
    assert [line["num_ranks"] for line in lines(folder / "run")][-1] == num_ranks


@pytest.mark.timeout(300)
def test_fresh_forgets_the_snapshots(folder: Path) -> None:
    asked = config(folder / "run", train={"steps": 6}, checkpoint={"every": 0, "memory": True, "memory_every": 1})
    on_ranks(asked, crash_after=4)
    key = key_in(folder / "run")
    ended = run_ranks(trained_fresh, num_ranks=2, args=(asked,))[0]
    assert ended == 1
    assert key_in(folder / "run") != key
    assert not list(Path("/dev/shm").glob(f"shardwise-{key}"))


def trained_fresh(rank: int, asked: TrainConfig) -> int:
    from rich.console import Console

    from shardwise.training.rank_run import train

    seen: list[int] = []
    train(asked, fresh=True, on_step=lambda metrics: seen.append(metrics.step), console=Console(quiet=True))
    return seen[0]
