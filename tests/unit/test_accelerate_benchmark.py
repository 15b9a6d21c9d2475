"""benchmarks/accelerate_vit.py: what its table shows, and that no process outlives a failure or its time."""

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import accelerate_vit

    return accelerate_vit


def done(name: str, *, peak_bytes: int, error: str | None = None) -> dict[str, Any]:
    rank = {"peak_allocated_bytes": peak_bytes, "peak_reserved_bytes": peak_bytes + 1}
    facts = {"name": name, "batch_size": 32, "error": error, "ranks": [rank]}
    return {**facts, "samples_per_s": 100.0, "losses": [7.0, 6.9]}


def test_the_table_shows_savings_and_failures(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        done("ddp", peak_bytes=10_000_000_000),
        done("fsdp_full_shard", peak_bytes=6_000_000_000),
        done("fsdp2", peak_bytes=1, error="exit codes [1, 1]: …"),
    ]
    script.print_table(cases, shared_gpu=True)
    shown = capsys.readouterr().out
    assert "6.00" in shown
    assert "40%" in shown
    assert "failed: exit codes [1, 1]" in shown
    assert "not a speed result" in shown


def test_when_one_process_fails_the_others_are_ended(script: ModuleType) -> None:
    waits = ([sys.executable, "-c", "import time; time.sleep(50)"], {})
    fails = ([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {})
    start = time.monotonic()
    error = script.run([waits, fails], limit_s=40)
    assert "3" in error
    assert "the reason" in error
    assert time.monotonic() - start < 30


def test_a_case_ends_with_its_time(script: ModuleType) -> None:
    waits = ([sys.executable, "-c", "import time; time.sleep(50)"], {})
    assert script.run([waits, waits], limit_s=1).startswith("not done after 1 s")
    assert script.run([([sys.executable, "-c", ""], {})], limit_s=40) is None
