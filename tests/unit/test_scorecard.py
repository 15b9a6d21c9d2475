"""The scorecard of `make chaos`: what a row counts, what is shown of it, and whether it fails the run."""

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def ran(body: Any, folder: Path, *, long: bool = False) -> dict[str, Any]:
    from scorecard import Fault, run_fault

    fault = Fault(name="1", shows="a fault", must_be="survived", run=body)
    return run_fault(fault, long=long, seed=0, folder=folder)


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
    from scorecard import Tally, section

    rows = {name: ran(lambda asked: Tally(tried=2, held=2), tmp_path, long=name == "2") for name in ("1", "2")}
    short, long = section({"rows": rows}).partition("|---")[2].splitlines()[1:3]
    assert short.startswith("| 1 | a fault | survived | 2 | 2 | short | ")
    assert long.startswith("| 2 | a fault | survived | 2 | 2 | long | ")
