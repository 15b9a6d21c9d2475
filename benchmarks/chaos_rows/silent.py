"""Row 19: the known ways to be silently wrong, each of which must be right or refused (`make reliability`)."""

import re
import subprocess
import sys

from rows import ROOT
from scorecard import Asked, CannotRun, Fault, Tally

_PAGE = ROOT / "docs" / "reliability.md"
_LEDGER = ROOT / "tests" / "reliability"
_SUMMARY = re.compile(r"\*\*(\d+) cases: (\d+) right, (\d+) refused, (\d+) warned, (\d+) not tested, (\d+) failed")


def known_cases(asked: Asked) -> Tally:
    """Runs the tests of the ledger, which write their section of docs/reliability.md, and counts what it says."""
    if not _LEDGER.is_dir():
        raise CannotRun("tests/reliability, the list of these cases, is not in this version")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--reliability", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = _SUMMARY.search(_PAGE.read_text())
    if found is None:
        raise AssertionError(f"no summary in {_PAGE.name}: {done.stdout[-500:]}{done.stderr[-500:]}")
    cases, right, refused, warned, untested, failed = map(int, found.groups())
    # A case may be right under one strategy and refused under another, so that its outcomes are more than the cases.
    tally = Tally(tried=cases, held=cases - untested - failed)
    tally.found |= {"right": right, "refused": refused, "warned": warned, "silent": failed, "not tested": untested}
    if failed or untested:
        tally.failures.append(f"{failed} of {cases} cases failed, {untested} have no test")
    return tally


ROWS = [
    Fault(
        name="19",
        shows='the cases of "right, or refused" (`make reliability`)',
        must_be="0 silent",
        run=known_cases,
    )
]
