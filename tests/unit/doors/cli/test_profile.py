"""`shardwise profile`, as it is typed."""

import json
from pathlib import Path

import pytest

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.doors.cli.app import main
from shardwise.plan.placement import STRATEGIES

SMALL = ("gpt-tiny", "--seq", "8", "--device", "cpu", "--steps", "1")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["profile", *arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals in this process, which is faster than one for each."""
    from shardwise.measure.profile.rehearsal_process import rehearse

    monkeypatch.setattr("shardwise.measure.profile.rehearsal.rehearse_apart", rehearse)


@pytest.mark.ledger("import-from-here", outcome="right")
def test_the_json_is_the_contract(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as it is for a user; a torch.py in the working folder is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise RuntimeError('not mine')")
    assert run(*SMALL, "--strategy", "fsdp", "--ranks", "8", "--json") == 0
    data = json.loads(capfd.readouterr().out)
    assert {name: data[name] for name in ("model", "device", "ranks", "micro_batch", "seq", "precision")} == {
        "model": "gpt-tiny",
        "device": "cpu",
        "ranks": 8,
        "micro_batch": 1,
        "seq": 8,
        "precision": "fp32",
    }
    (row,) = data["rows"]
    assert row["strategy"] == "fsdp"
    for name in ("predicted_bytes", "measured_bytes"):
        assert set(row[name]["breakdown"]) == set(CATEGORIES)
        assert sum(row[name]["breakdown"].values()) == row[name]["allocated"]
        assert row[name]["reserved"] is None
    assert row["error"] == pytest.approx(row["predicted_bytes"]["allocated"] / row["measured_bytes"]["allocated"] - 1)
    assert abs(row["error"]) < 0.02
    assert row["step_seconds"] == row["steps_seconds"][0] > 0
    totals = {moment["at"]: sum(moment["bytes"].values()) for moment in row["timeline"]}
    assert max(totals.values()) == row["measured_bytes"]["allocated"] == totals[row["measured_bytes"]["at"]]
    assert all(set(moment["predicted_bytes"]) == set(CATEGORIES) for moment in row["timeline"])


@pytest.mark.usefixtures("_here")
def test_the_table_has_two_lines_a_strategy_and_fits_into_80_columns(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--ranks", "4") == 0
    lines = capfd.readouterr().out.splitlines()
    assert "rank 0 of 4, without the others" in lines[0]
    named = [line.split() for line in lines[2:12]]
    assert [words[0] for words in named] == [word for name in STRATEGIES for word in (name, "predicted")]
    # Peak, seven categories, and the error of what was predicted.
    assert {len(words) for words in named} == {9, 10}
    assert all(words[-1].endswith("%") for words in named[::2])
    assert max(map(len, lines[1:])) <= 80
    assert not any("…" in line for line in lines)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(("units", "count"), [("auto", 5), ("none", 1)])
def test_one_strategy_is_shown_row_by_row(units: str, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--strategy", "fsdp", "--units", units) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("before", "after", "grads", "backward"))]
    assert rows[0].startswith("before forward (root)")
    assert rows[-1].startswith("after step (root)")
    # Four rows of each unit, the end of backward and the update.
    assert len(rows) == count * 4 + 2
    assert sum("◀ peak" in row for row in rows) == 1
    assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3"], "unknown model 'gpt3'; did you mean"),
        (["gpt-tiny", "--strategy", "fsdp2"], "unknown strategy 'fsdp2'; did you mean"),
        (["gpt-tiny", "--optimizer", "lion"], "unknown optimizer 'lion'"),
        (["gpt-tiny", "--ranks", "0"], "--ranks 0: must be a whole number of at least 1"),
        (["gpt-tiny", "--micro-batch", "0"], "micro_batch = 0"),
        (["gpt-tiny", "--precision", "fp4"], "precision = 'fp4': must be one of"),
        (["gpt-tiny", "--image", "3"], "--image has no meaning"),
        (["gpt-tiny", "--engine", "torch", "--strategy", "zero1"], "torch has no engine for it"),
        (["gpt-tiny", "--history", "h.pickle"], "only a GPU allocator keeps a history"),
        (["params:60b"], "a parameter count cannot be run; shardwise plan predicts its states"),
        (["python:nowhere.py:task"], "there is no file nowhere.py"),
        (["gpt-tiny", "--seq", "8", "--micro-batch", "1000000000"], "fsdp --micro-batch 1 fits (0.5 GiB)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--device", "cpu") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_device_that_is_not_there_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("gpt-tiny", "--device", "tpu") == 2
    assert "--device tpu: must be cuda or cpu" in capfd.readouterr().err
