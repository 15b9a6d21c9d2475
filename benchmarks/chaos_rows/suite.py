"""Rows 7, 10 to 14, 17 and 19: faults that tests of the suite inject. Each test is one; long means `--whole`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from rows import ROOT
from scorecard import Asked, Tally

_PAGE = ROOT / "docs" / "reliability.md"
_SUMMARY = re.compile(r"\*\*(\d+) cases: (\d+) right, (\d+) refused, (\d+) warned, (\d+) not tested, (\d+) failed")


def _pytest(*arguments: str) -> str:
    """Run pytest in a process of its own; return what it wrote."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=600", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def faults_of(*files: str, only: str = "") -> Callable[[Asked], Tally]:
    """Return a row's function: it runs the tests of these files whose names match `only`."""

    def run(asked: Asked) -> Tally:
        report = asked.folder / "report.xml"
        options = [*(["--whole"] if asked.long else []), *(["-k", only] if only else [])]
        output = _pytest(f"--junitxml={report}", *options, *(str(Path("tests", file)) for file in files))
        assert report.exists(), output[-1000:]
        tally = Tally()
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                with tally.trying(case.attrib["name"]):
                    problem = next((part for part in case if part.tag in ("failure", "error")), None)
                    assert problem is None, problem.attrib.get("message", "")
        return tally

    return run


def known_cases(asked: Asked) -> Tally:
    """Run the tests of the ledger, which write their section of docs/reliability.md, and count what it says."""
    output = _pytest("--reliability")
    found = _SUMMARY.search(_PAGE.read_text())
    assert found is not None, f"no summary in {_PAGE.name}: {output[-1000:]}"
    cases, right, refused, warned, untested, failed = map(int, found.groups())
    # A case may be right under one strategy and refused under another, so that its outcomes are more than the cases.
    tally = Tally(tried=cases, held=cases - untested - failed)
    tally.found |= {"right": right, "refused": refused, "warned": warned, "silent": failed, "not tested": untested}
    if failed or untested:
        tally.failures.append(f"{failed} of {cases} cases failed, {untested} have no test")
    return tally
