"""Rows 7, 10 to 14, 17 and 19: faults that tests of the suite inject. Each test is one; long means `--whole`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from rows import ROOT
from scorecard import Asked, Fault, Tally

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


ROWS = [
    Fault(
        name="7",
        shows="every strategy's checkpoint into every strategy (short: into some), from and to 1, 2, 3, 4 ranks, sizes "
        "that do not divide",
        must_be="state bit-equal, also after two more steps",
        run=faults_of("dist/test_checkpoint_matrix.py"),
    ),
    Fault(
        name="10",
        shows="a stopped rank, one that is late with its data or in evaluation; a skipped or an extra collective",
        must_be="rank and operation named in < 5 s after the limit",
        run=faults_of("dist/test_watch.py", only="named or name or stopped"),
    ),
    Fault(
        name="11",
        shows="swapped collectives of equal size, also under the late backend",
        must_be="caught before the optimizer step",
        run=faults_of("dist/test_same_order.py", only="wrong_order"),
    ),
    Fault(
        name="12",
        shows="one rank raises, exits or is killed, at 32 points (short: 26)",
        must_be="all end in < 10 s, the true cause shown, no orphans",
        run=faults_of("dist/test_launch_points.py", "dist/test_launch_train.py", only="goes_wrong or breaks"),
    ),
    Fault(
        name="13",
        shows="one bit flipped in one replica",
        must_be="found at the next comparison, parameter and rank named",
        run=faults_of("dist/test_same_order.py", only="flipped or three_ranks"),
    ),
    Fault(
        name="14",
        shows="Inf or NaN on one rank, or in a shard that others do not have",
        must_be="all ranks skip or stop, scales equal",
        run=faults_of("dist/test_precision.py", "dist/test_nonfinite.py", only="overflow or nan or skipped or finite"),
    ),
    Fault(
        name="17",
        shows="ten launches of 1 and 2 ranks at once (short: two)",
        must_be="no port failure, no listener beyond loopback",
        run=faults_of("dist/test_launch.py", only="at_once"),
    ),
    Fault(
        name="19",
        shows='the cases of "right, or refused" (`make reliability`)',
        must_be="0 silent",
        run=known_cases,
    ),
]
