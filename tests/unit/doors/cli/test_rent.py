"""`shardwise rent`, as it is typed."""

import json
from pathlib import Path

import pytest

import shardwise.hardware.prices
from shardwise.doors.cli.app import main
from shardwise.plan import Plan


@pytest.fixture(autouse=True)
def one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short price list, so that a test takes seconds."""
    table = shardwise.hardware.prices.shipped_table("prices")
    monkeypatch.setattr(shardwise.hardware.prices, "shipped_table", lambda name: {"h100-80gb": table["h100-80gb"]})


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["rent", *arguments])
    return int(caught.value.code or 0)


def test_the_recommended_rental_comes_first_with_its_price_and_plan(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("gpt2-124m", "--tokens", "2B", "--price", "h100-80gb=2.5", "--save", str(tmp_path / "plan.toml")) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "▶ 8xh100-80gb ddp" in out
    assert "at $2.50 per GPU-hour (--price)." in out
    assert "shardwise plan gpt2-124m --cluster 8xh100-80gb --strategy ddp --save plan.toml" in out
    assert Plan.load(tmp_path / "plan.toml").strategy == "ddp"


def test_adapters_are_planned_and_part_of_the_command_for_the_plan(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One trace with adapters instead of three.
    monkeypatch.setattr("shardwise.planner.search.rent.RECOMPUTES", ("none",))
    assert run("llama-tiny", "--tokens", "1M", "--lora", "4", "--lora-targets", "q", "--units", "auto + head") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "shardwise plan llama-tiny --lora 4 --lora-targets q --units 'auto + head' --cluster" in out


def test_a_plan_in_host_memory_comes_with_the_command_that_finds_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.planner.search.rent.COUNTS", (1,))
    monkeypatch.setattr("shardwise.planner.search.rent.MACHINES", ())
    job = ("gpt2-1.5b", "--tokens", "2B", "--price", "rtx-4090=0.4", "--price", "h100-80gb=1000")
    assert run(*job, "--host-memory-per-gpu", "60GiB") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "▶ 1xrtx-4090 auto" in out
    assert "host memory (optimizer states in host memory" in out
    assert "shardwise plan gpt2-1.5b --cluster 1xrtx-4090 --strategy auto --host-memory 60GiB --save plan.toml" in out
    assert run(*job, "--host-memory-per-gpu", "0", "--json") == 0
    assert "1xrtx-4090" not in capfd.readouterr().out


def test_nothing_within_the_limits_says_what_is_nearest_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2-124m", "--tokens", "2B", "--max-price", "1", "--json") == 1
    data = json.loads(capfd.readouterr().out)
    assert data["recommended"] is None
    assert {row["cluster"] for row in data["rentals"]} >= {"1xh100-80gb", "8xh100-80gb"}
    assert data["rentals"][0]["price_date"] == "2026-11-09"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("gpt2-124m", "--tokens", "2B", "--price", "h100-80gb=x"), "must be KIND=DOLLARS per GPU-hour"),
        (("gpt2-124m", "--tokens", "many"), "--tokens many: must be a number"),
        (("params:7b", "--tokens", "2B"), "there is no speed and no cost"),
        (("resnet18", "--tokens", "2B"), "not counted in tokens"),
    ],
)
def test_a_mistake_is_one_line(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    assert run(*arguments) == 2
    assert expected in capfd.readouterr().err
