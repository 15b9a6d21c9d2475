"""A rank that stops is named by the others, and the job ends: no rank waits in silence."""

import gc
import multiprocessing
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ports import free_port
from processes import processes_with, ranks_left
from ranks import run_ranks
from stalling import run_rank
from whole import whole
from wrong import WIDTH, Blocks

from reliability.said import say
from shardwise.comm.groups.small_collectives import from_first
from shardwise.comm.watch.watch import EXIT_CODE
from shardwise.engines import prepare
from shardwise.plan import Plan
from shardwise.training.launch.launch import launch

HERE = Path(__file__).parent
STALLING = str(HERE / "stalling.py")
WATCH_SECONDS = 3.0
# Under eight on quiet cores; without the watchdog, Gloo would wait for half an hour.
SOON_SECONDS = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """How a rank ended (None: it did not), after how many seconds since rank 1 went wrong, and what it wrote."""

    code: int | None
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        """The line with which it ended."""
        lines = [line for line in self.output.splitlines() if f"ends with exit code {EXIT_CODE}" in line]
        assert len(lines) == 1, self.output
        return lines[0]


def started(fault: str, strategy: str, folder: Path, **more: str) -> list[Rank]:
    """Two ranks in a bare loop, without any launcher; those that do not end are killed."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }
    # The fork server of the ranks' pools, which has imported torch.
    context = multiprocessing.get_context("forkserver")
    arguments = (fault, strategy, str(WATCH_SECONDS))
    processes = [
        context.Process(target=run_rank, args=(rank, environment, folder / f"rank-{rank}.txt", arguments))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    deadline = time.monotonic() + 100
    while len(ends) < 2 and time.monotonic() < deadline:
        ends |= {rank: time.time() for rank in (0, 1) if rank not in ends and not processes[rank].is_alive()}
        if ends and fault == "stopped":
            break
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    outputs = [(folder / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    wrong = re.search(r"wrong at ([\d.]+)", "".join(outputs))
    since = float(wrong[1]) if wrong else 0.0
    return [
        Rank(code=codes[rank], seconds=ends.get(rank, time.time()) - since, output=outputs[rank]) for rank in (0, 1)
    ]


@pytest.mark.ledger("stopped-rank", outcome="refused")
@pytest.mark.parametrize(("fault", "strategy"), [("stopped", "fsdp"), *whole(("stopped", "ddp"))])
def test_a_process_that_is_stopped_is_named_by_the_others(fault: str, strategy: str, tmp_path: Path) -> None:
    waiting, stopped = started(fault, strategy, tmp_path)
    operation = "gather blocks.0" if strategy == "fsdp" else r"reduce blocks\S+"
    why = r"has held up the others for (\d+) s and does not answer"
    named = re.search(rf"rank 1 stopped \({why}\): at or before {operation}, step 4", waiting.verdict)
    assert named
    assert re.search(rf"rank 0 waiting in {operation}, step 4", waiting.verdict)
    # The seconds can be compared with what the user has set.
    limit = re.search(rf"the limit is (\d+) s \(watch_seconds = {WATCH_SECONDS:g}[,)]", waiting.verdict)
    assert limit
    assert int(named[1]) >= int(limit[1]) >= WATCH_SECONDS
    said = re.sub(r"the limit is \d+ s \(.*?\)", "the limit is 60 s (watch_seconds = 60)", waiting.verdict)
    say(re.sub(r"\d+ s\b", "60 s", said))
    assert waiting.code == EXIT_CODE
    assert stopped.code is None
    assert waiting.seconds < SOON_SECONDS


def test_a_stopped_process_that_serves_the_store_is_named_too(tmp_path: Path) -> None:
    stopped, waiting = started("stopped", "ddp", tmp_path, WRONG_RANK="0")
    assert re.search(r"rank 0 stopped \(has held up the others for \d+ s and does not answer\)", waiting.verdict)
    assert (stopped.code, waiting.code) == (None, EXIT_CODE)
    assert waiting.seconds < SOON_SECONDS


@pytest.mark.parametrize(
    ("fault", "strategy", "where"),
    [
        ("evaluation", "fsdp", r"step 4, evaluation, in forward blocks\.2"),
        *whole(
            ("data", "ddp", r"step 4, between steps, after update \(root\)"),
            ("data", "fsdp", r"step 4, between steps, after update \(root\)"),
            ("alone", "ddp", r"step 4, evaluation, in forward \S+"),
        ),
    ],
)
def test_a_rank_whose_own_code_holds_up_the_others_is_named_by_all(
    fault: str, strategy: str, where: str, tmp_path: Path
) -> None:
    for rank in started(fault, strategy, tmp_path):
        why = r"has held up the others for \d+ s and issues nothing"
        assert re.search(rf"rank 1 stopped \({why}\): {where}; rank 0 waiting in", rank.verdict)
        assert rank.code == EXIT_CODE
        assert rank.seconds < SOON_SECONDS


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (
            "skip reduce",
            "as number 2 of the reduce group, rank 0 issued reduce blocks.2 of 320 elements, rank 1 reduce b",
        ),
        *whole(
            (
                "extra reduce",
                "as number 3 of the reduce group, rank 0 issued reduce blocks.1 of 320 elements, rank 1 red",
            )
        ),
    ],
)
def test_ranks_that_wait_for_each_other_after_different_collectives_name_the_first(
    fault: str, named: str, tmp_path: Path
) -> None:
    """Two of equal size fit together, so the backend does not notice; no update is done."""
    for rank in started(fault, "fsdp", tmp_path):
        assert named in rank.verdict
        assert rank.code == EXIT_CODE
        assert "step 3 is done" in rank.output
        assert "step 4 is done" not in rank.output


@pytest.mark.parametrize(
    ("fault", "call", "other"),
    [
        ("state_dict", "state_dict", r"has gone on to gather \S+ \(forward of step 4\)"),
        ("forward, barrier", r"a forward without gradients \(.*\)", r"waits in torch.distributed.barrier\(\)"),
        *whole(
            ("state_dict, barrier", "state_dict", r"waits in torch.distributed.barrier\(\)"),
            ("forward", r"a forward without gradients \(.*\)", r"has gone on to gather \S+ \(forward of step 4\)"),
        ),
    ],
)
def test_a_call_on_one_rank_that_needs_all_is_named_by_all_within_seconds(
    fault: str, call: str, other: str, tmp_path: Path
) -> None:
    for rank in started(fault, "fsdp", tmp_path):
        said = rf"rank 1 waits in {call}, which needs all ranks, and rank 0 {other}: call it on every rank"
        assert re.search(said, rank.verdict)
        assert rank.code == EXIT_CODE
        assert rank.seconds < SOON_SECONDS


def test_a_call_that_a_rank_has_ended_without_is_named_within_seconds(tmp_path: Path) -> None:
    waiting, ended = started("forward, end", "fsdp", tmp_path, WRONG_RANK="0")
    assert re.search(r"rank 0 waits in a forward without gradients .* and rank 1 has ended: call it", waiting.verdict)
    assert (waiting.code, ended.code) == (EXIT_CODE, 0)
    assert waiting.seconds < SOON_SECONDS


@pytest.mark.whole
def test_a_call_that_waits_for_the_rank_with_the_store_says_that_it_has_ended(tmp_path: Path) -> None:
    ended, waiting = started("forward, end", "fsdp", tmp_path)
    assert re.search(r"this rank waits in a forward without gradients .*usually rank 0\) has ended", waiting.output)
    assert (ended.code, waiting.code) == (0, 1)


@pytest.mark.parametrize("strategy", ["ddp", *whole("fsdp")])
def test_a_pause_that_all_ranks_make_ends_no_job(strategy: str, tmp_path: Path) -> None:
    for rank in started("pause", strategy, tmp_path):
        assert rank.code == 0, rank.output
        assert "step 6 is done" in rank.output
        assert "shardwise [" not in rank.output


@pytest.mark.whole
def test_our_launcher_tells_of_the_rank_that_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTED_IN", str(tmp_path))
    arguments = ["stopped", "fsdp", str(WATCH_SECONDS)]
    code = launch(arguments, num_ranks=2, max_restarts=0, folder=tmp_path / "run", program=STALLING)
    lines = capfd.readouterr().err.splitlines()
    # What rank 0 said itself, and the launcher's own report.
    assert any(line.startswith("shardwise [rank 0]: rank 1 stopped") for line in lines)
    (told,) = [line for line in lines if line.startswith("rank 1 failed first")]
    assert "RankStopped: rank 1 stopped (has held up the others" in told
    assert "rank 0 waiting in gather blocks.0, step 4" in told
    assert code == 1
    assert processes_with(f"TESTED_IN={tmp_path}") == []


CONFIG = f"""
[task]
model = "python:{HERE / "stalling_task.py"}:make"
[plan]
strategy = "fsdp"
micro_batch = 2
units = "class:Block"
[train]
steps = 8
[run]
device = "cpu"
tensorboard = false
watch_seconds = {WATCH_SECONDS}
"""


def test_a_training_whose_data_hold_up_one_rank_ends_and_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked_ranks: None
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    arguments = ["train", str(tmp_path / "config.toml"), "--run", str(tmp_path / "run")]
    code = launch(arguments, num_ranks=2, max_restarts=0, folder=tmp_path / "run")
    errors = capfd.readouterr().err
    (told,) = [line for line in errors.splitlines() if line.startswith("rank 1 failed first")]
    why = r"has held up the others for \d+ s and issues nothing"
    assert re.search(rf"RankStopped: rank 1 stopped \({why}\): step 4, between steps", told)
    assert code == 1
    assert ranks_left() == []


def leaves_no_thread(rank: int) -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, Plan())
    watching = [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-watch")]
    assert len(watching) == 2
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    for thread in watching:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_the_watchdog_ends_with_the_last_model() -> None:
    run_ranks(leaves_no_thread, num_ranks=2)


def outlives_the_model_before(rank: int) -> None:
    """The last model goes, by chance, just while the next one is prepared."""
    models = [Blocks()]
    prepare(models[0], None, Plan())

    def collected(value: str) -> str:
        models.clear()
        gc.collect()
        return from_first(value)

    with patch("shardwise.comm.watch.watch.from_first", collected):
        model = Blocks()
        prepare(model, None, Plan())
    watching = [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-watch")]
    assert len(watching) >= 2
    assert not models


def test_the_watchdog_goes_on_when_one_model_follows_another() -> None:
    run_ranks(outlives_the_model_before, num_ranks=2)


def is_turned_off(rank: int) -> None:
    prepare(Blocks(), None, Plan(), watch_seconds=0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-watch")]


def test_zero_seconds_turn_the_watchdog_off() -> None:
    run_ranks(is_turned_off, num_ranks=2)
