"""`pytest --reliability`: what the marked tests show goes into docs/reliability.md."""

from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path

import pytest

from reliability.cost import cost_section
from reliability.findings import NEEDS_GPU, Finding, readable, rows
from reliability.ledger import LISTS, claims
from reliability.page import ROOT, cases_section, write
from reliability.said import take


class Recorder:
    """Notes what each test showed, and writes it down when all have run."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Called after the set-up, the call and the tear-down of a test: the first that is not a pass counts."""
        report = yield
        if report.when == "setup" or not self.findings[item.nodeid].trouble:
            self.findings[item.nodeid] = _finding(item, report, before=self.findings.get(item.nodeid))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """An interrupted run, or one of a part of the tests, shows nothing of the others: it leaves the page alone."""
        config = session.config
        every_test = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        if not every_test or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print("\nnot all tests ran: the page is left as it was")
            return
        found = {title: rows(cases, findings=list(self.findings.values())) for title, cases in LISTS.items()}
        cases = cases_section(found, torch_version=version("torch").partition("+")[0])
        write({"cases": cases, "cost": cost_section()})
        missing = [f"{row.case}: {row.outcome}" for of_list in found.values() for row in of_list if not row.shown]
        if missing:
            print("\n" + "\n".join(missing))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _finding(item: pytest.Item, report: pytest.TestReport, *, before: Finding | None) -> Finding:
    trouble = ""
    if report.failed:
        trouble = "FAILED"
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        trouble = NEEDS_GPU if item.get_closest_marker("gpu") else f"skipped: {reason.removeprefix('Skipped: ')}"
    places: dict[Path, str] = {ROOT: ""}
    if isinstance(item, pytest.Function) and "tmp_path" in item.funcargs:
        places[item.funcargs["tmp_path"]] = "DIR"
    lines = tuple(readable(line, places=places) for line in take())
    return Finding(claims=tuple(claims(item)), lines=(before.lines if before else ()) + lines, trouble=trouble)
