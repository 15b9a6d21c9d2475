"""docs/reliability.md lists every case of the ledger, and every case has a test; how the page is made."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from reliability.cost import cost_section
from reliability.findings import NEEDS_GPU, UNTESTED, Finding, Row, readable, rows
from reliability.ledger import CASES, OUTCOMES, Claim, claims
from reliability.page import FRAME, PAGE, fill, listed, table

TESTS = Path(__file__).parents[1]


@cache
def marked() -> dict[str, set[str]]:
    """Case → outcomes, of all markers in the tests' sources: reading them is faster than collecting the tests."""
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "mark.ledger(" not in path.read_text() or path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.ledger":
                outcome = next(ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "outcome")
                found.setdefault(ast.literal_eval(node.args[0]), set()).add(outcome)
    return found


class TestCommittedPage:
    def test_lists_every_case_in_order_and_no_other(self) -> None:
        assert list(listed(PAGE.read_text())) == list(CASES), "make reliability"

    def test_every_case_has_a_test(self) -> None:
        assert marked().keys() == CASES.keys()

    def test_shows_what_the_tests_say(self) -> None:
        shown = {case: outcomes - {NEEDS_GPU} for case, outcomes in listed(PAGE.read_text()).items()}
        assert shown == {case: marked()[case] for case in CASES}, "make reliability"

    def test_nothing_is_silent_or_failed(self) -> None:
        for case, outcomes in listed(PAGE.read_text()).items():
            assert outcomes <= {*OUTCOMES, NEEDS_GPU}, case

    def test_shows_the_cost_that_was_measured(self) -> None:
        assert f"\n{cost_section()}\n" in PAGE.read_text(), "make reliability"

    def test_no_path_of_a_run_is_on_it(self) -> None:
        assert not re.search(r"/(tmp|home|root|work|Users)/|pytest-of-", PAGE.read_text())


RIGHT = Claim(case="float64-model", outcome="right", under=("fsdp",))
REFUSED = Claim(case="float64-model", outcome="refused", under=("zero1",))


def shown(*findings: Finding) -> list[tuple[tuple[str, ...], str, str]]:
    return [(row.under, row.outcome, row.line) for row in rows(["float64-model"], findings=findings)]


class TestRows:
    def test_tests_that_show_the_same_are_one_row_with_the_first_line(self) -> None:
        other = Claim(case="float64-model", outcome="refused", under=("ddp",))
        found = shown(Finding(claims=(REFUSED,), lines=("no", "never")), Finding(claims=(other,), lines=("nay",)))
        assert found == [(("ddp", "zero1"), "refused", "no")]

    def test_other_outcomes_are_other_rows(self) -> None:
        found = shown(Finding(claims=(REFUSED,), lines=("no",)), Finding(claims=(RIGHT,)))
        assert found == [(("zero1",), "refused", "no"), (("fsdp",), "right", "")]

    def test_a_case_without_a_test_says_so(self) -> None:
        assert shown() == [((), UNTESTED, "")]

    def test_a_test_that_failed_or_was_skipped_shows_nothing_else(self) -> None:
        found = shown(Finding(claims=(REFUSED,), lines=("no",), trouble="FAILED"))
        assert found == [(("zero1",), "FAILED", "")]

    def test_a_refusal_without_a_line_has_failed(self) -> None:
        assert shown(Finding(claims=(REFUSED,))) == [(("zero1",), "FAILED: no line was shown", "")]

    def test_lines_of_a_refusal_are_not_those_of_what_is_right_in_the_same_test(self) -> None:
        other = Claim(case="shared-encoder", outcome="refused")
        assert shown(Finding(claims=(RIGHT, other), lines=("no",))) == [(("fsdp",), "right", "")]

    @pytest.mark.parametrize(
        ("outcome", "counts"),
        [
            ("right", True),
            ("warned", True),
            (NEEDS_GPU, True),
            (UNTESTED, False),
            ("FAILED", False),
            ("skipped", False),
        ],
    )
    def test_only_what_was_seen_and_a_missing_gpu_are_in_order(self, outcome: str, counts: bool) -> None:
        assert Row(case="float64-model", under=(), outcome=outcome, line="").shown is counts


def test_a_readable_line_is_the_first_one_without_the_paths_of_the_run() -> None:
    places = {Path("/tmp/a"): "DIR", Path("/tmp/a/repository"): ""}
    line = "\n/tmp/a/run/.lock:  in /tmp/a, /tmp/a/repository/tests/x.py\nmore"
    assert readable(line, places=places) == "DIR/run/.lock: in DIR, tests/x.py"
    assert readable("word " * 200, places={}).endswith(" word …")


class TestPage:
    FRAME = "# Title\n<!-- section a -->\n<!-- end of a -->\ntext\n<!-- section b -->\nnone yet\n<!-- end of b -->\n"

    def test_a_command_leaves_the_sections_of_others_as_they_are(self) -> None:
        page = fill(self.FRAME, page="", sections={"a": "one"})
        assert "one" in page
        assert "none yet" in page
        page = fill(self.FRAME.replace("text", "other text"), page=page, sections={"b": "two"})
        assert page.index("one") < page.index("other text") < page.index("two")
        assert fill(self.FRAME, page=page, sections={"b": "two"}) == page.replace("other text", "text")
        assert "none yet" not in page

    def test_a_section_that_the_frame_does_not_have_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"page\.md has no section c"):
            fill(self.FRAME, page="", sections={"c": "three"})

    def test_the_committed_page_is_the_frame_with_its_sections(self) -> None:
        assert fill(FRAME.read_text(), page=PAGE.read_text(), sections={}) == PAGE.read_text()

    def test_bars_and_backticks_of_a_line_do_not_break_the_table(self) -> None:
        text = table([Row(case="float64-model", under=(), outcome="refused", line="a | `b`")])
        assert text.splitlines()[-1].endswith("| `` a \\| `b` `` |")
        assert listed(text) == {"float64-model": {"refused"}}


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.ledger("no-such-case", outcome="right"),
        pytest.mark.ledger("float64-model", outcome="silent"),
        pytest.mark.ledger("float64-model"),
        pytest.mark.ledger("float64-model", outcome="right", on="cpu"),
    ],
)
def test_a_marker_that_is_wrong_is_refused(mark: pytest.MarkDecorator, request: pytest.FixtureRequest) -> None:
    class Item:
        nodeid = "tests/x.py::test_y"

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [mark.mark]

    with pytest.raises(pytest.UsageError, match="test_y: ledger"):
        claims(Item())  # type: ignore[arg-type]
