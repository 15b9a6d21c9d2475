"""The scorecard of `make chaos`: what a row counts, what is shown of it, and whether it fails the run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def ran(body: Any, folder: Path, *, long: bool = False) -> dict[str, Any]:
    from scorecard import Row, run_row

    return run_row(Row(number=1, test="a fault", must_be="survived", run=body), long=long, seed=0, folder=folder)


def test_a_row_of_which_one_did_not_hold_or_that_breaks_or_tries_nothing_has_not_held(tmp_path: Path) -> None:
    from scorecard import Asked, Tally, held

    def half(asked: Asked) -> Tally:
        tally = Tally()
        for number in range(2):
            with tally.trying(f"number {number}"):
                assert number, "no"
        return tally

    def breaks(asked: Asked) -> Tally:
        raise RuntimeError("broken")

    result = ran(half, tmp_path)
    assert (result["tried"], result["held"], len(result["failures"])) == (2, 1, 1)
    assert not held(result)
    assert not held(ran(breaks, tmp_path))
    assert not held(ran(lambda asked: Tally(), tmp_path))
    assert held(ran(lambda asked: Tally(tried=2, held=2), tmp_path))


def test_the_table_says_which_version_a_figure_is_from(tmp_path: Path) -> None:
    from scorecard import Tally, table

    results = [ran(lambda asked: Tally(tried=2, held=2), tmp_path, long=long) for long in (False, True)]
    short, long = table(results).splitlines()[2:4]
    assert short.startswith("| 1 | a fault | survived | 2 | 2 | short | ")
    assert long.startswith("| 1 | a fault | survived | 2 | 2 | long | ")


def test_the_processor_time_of_ended_children_counts() -> None:
    from cpu_time import cpu_seconds

    before = cpu_seconds()
    work = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-S", "-c", work], check=True)
    assert 0.4 < cpu_seconds() - before < 10
