"""The pages of the planner: what one command writes stands between marks, and everything else stays."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.planner.time.band import PARTS

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs" / "planner.md", ROOT / "docs" / "measured-planner.md")


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("planner_docs")
    for name in set(sys.modules) - before:
        if not name.startswith(("shardwise", "torch")):
            sys.modules.pop(name)


def test_the_pages_have_exactly_the_sections_that_the_command_writes(docs: ModuleType) -> None:
    named = [name for page in PAGES for name in re.findall(r"<!-- section ([\w-]+) -->", page.read_text())]
    assert sorted(named) == sorted(docs.SECTIONS)


def test_a_section_is_exchanged_and_the_rest_stays(docs: ModuleType) -> None:
    page = "a 1\n<!-- section x -->\nold\n<!-- end of x -->\nb 2\n<!-- section y -->\nkept\n<!-- end of y -->\n"
    found = docs.fill(page, {"x": "new"})
    assert found == page.replace("old", "new")
    assert docs.fill(found, {"x": "new"}) == found


def test_an_unknown_section_is_one_line(docs: ModuleType) -> None:
    with pytest.raises(SystemExit, match="has no section z"):
        docs.fill("<!-- section x -->\n<!-- end of x -->\n", {"z": "new"})


def test_every_part_of_the_band_is_on_the_page() -> None:
    section = PAGES[1].read_text().partition("## The band")[2].partition("\n## ")[0]
    told = {int(share) for share in re.findall(r"(\d+)%", section)}
    assert {round(100 * part) for part in PARTS.values()} <= told
