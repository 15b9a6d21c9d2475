import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.training.config.config_section import InvalidConfig
from shardwise.training.loop.metrics import JsonLines, StepMetrics, TensorBoard
from shardwise.training.loop.progress import PlainLines, ProgressBar, progress_on


def metrics(step: int, **values: Any) -> StepMetrics:
    given: dict[str, Any] = {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "num_samples": 8,
        "epoch": 0,
        "position": 8 * step,
        "seconds": 2.0,
        "samples_per_s": 4.0,
        "tokens_per_s": None,
        "peak_bytes": 2**30,
        "peak_of": "cuda",
        "num_ranks": 2,
        **values,
    }
    return StepMetrics(**given)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_of_steps_that_are_redone_are_cut_off_and_half_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, last_step=0)
    first.write([metrics(1), metrics(2), metrics(3)])
    first.close()
    with path.open("a") as file:
        file.write(metrics(4).to_json()[:30])
    again = JsonLines(path, last_step=2)
    assert steps_in(path) == [1, 2]
    again.write([metrics(3), metrics(4)])
    again.close()
    assert steps_in(path) == [1, 2, 3, 4]
    JsonLines(path, last_step=0).close()
    assert path.read_text() == ""


def test_a_file_that_is_whole_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, last_step=0)
    first.write([metrics(1)])
    first.close()
    before = path.stat().st_ino
    JsonLines(path, last_step=1).close()
    assert path.stat().st_ino == before


def test_a_line_is_json_also_where_the_loss_is_not_a_number() -> None:
    line = json.loads(metrics(1, loss=float("nan"), evaluation={"loss": float("inf"), "accuracy": 0.5}).to_json())
    assert line["loss"] is None
    assert line["evaluation"] == {"loss": None, "accuracy": 0.5}


def test_plain_lines_hold_what_matters_and_are_one_line_each() -> None:
    output = StringIO()
    shown = PlainLines(Console(file=output, width=20), first_step=0, num_steps=100)
    shown.write([metrics(1), metrics(2)])
    shown.write([metrics(3, tokens_per_s=4096.0, evaluation={"accuracy": 0.9375})])
    first, second, third = output.getvalue().splitlines()
    assert first == (
        "step 2/100  loss 5.0000  grad norm 1.5  lr 1.00e-03  4 samples/s  peak 1,024 MiB (cuda)  0:03:16 left"
    )
    assert "4,096 tokens/s" in second
    assert third == "step 3/100  evaluation: accuracy 0.9375"


def test_a_terminal_gets_a_bar() -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=90, _environ={})
    bar = progress_on(console, first_step=40, num_steps=100)
    assert isinstance(bar, ProgressBar)
    bar.write([metrics(50, evaluation={"accuracy": 0.9375})])
    bar.close()
    text = output.getvalue()
    for part in ("step 50/100", "loss 0.2000", "4 samples/s", "peak 1,024 MiB", "0:01:40 left", "accuracy 0.9375"):
        assert part in text
    assert isinstance(progress_on(Console(file=StringIO()), first_step=0, num_steps=1), PlainLines)


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoard(tmp_path, last_step=0)
    writer.write([metrics(1), metrics(2, evaluation={"accuracy": 0.5})])
    writer.close()
    # What was redone from step 2 on replaces what is there.
    writer = TensorBoard(tmp_path, last_step=1)
    writer.write([metrics(2, loss=3.0, evaluation={"accuracy": 0.75})])
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 10.0), (2, 3.0)]
    assert [event.value for event in events.Scalars("evaluation/accuracy")] == [0.75]


def test_the_share_of_replayed_calls_is_in_the_lines(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics.jsonl", last_step=0)
    file.write([metrics(3), metrics(4, replayed_share=0.75)])
    file.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["replayed_share"] for row in rows] == [None, 0.75]


def test_what_compiling_took_is_in_the_line_of_its_step_and_on_the_console(tmp_path: Path) -> None:
    steps = [metrics(1, compile_seconds=12.34), metrics(2)]
    file = JsonLines(tmp_path / "metrics.jsonl", last_step=0)
    file.write(steps)
    file.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["compile_seconds"] for row in rows] == [12.34, None]
    out = StringIO()
    PlainLines(Console(file=out, width=60), first_step=0, num_steps=9).write(steps)
    assert out.getvalue().count("torch.compile") == 1
    assert "step 1  torch.compile took 12.3 s of it\n" in out.getvalue()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_metrics_that_are_no_file_of_the_run_are_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "folder": path.mkdir,
    }
    make[kind]()
    with pytest.raises(InvalidConfig, match=r"metrics\.jsonl: cannot be written \(.*\): move it away"):
        JsonLines(path, last_step=0)
    assert not (tmp_path / "elsewhere").exists()


def test_lines_of_metrics_that_cannot_be_read_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": Infinity}\n' + "[" * 100_000 + "\n")
    JsonLines(path, last_step=1).close()
    assert path.read_text() == '{"step": 1}\n'
