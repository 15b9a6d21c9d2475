"""Benchmarks that are tables of rows: chaos.py, compatibility.py, integrations.py and scenarios.py.

A row has a name, says what it shows, and has a function that runs it. Its outcome is a dictionary that JSON can hold.
After each row all outcomes are written to one file, benchmarks/results/NAME.json, and to the page that is made from
them. A row that is not run keeps its outcome.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# With the blank lines around its text, where there are any: they stay.
_SECTION = re.compile(r"(<!-- section (?P<name>[\w-]+) -->\n\n?).*?(\n*)(<!-- end of (?P=name) -->\n)", re.DOTALL)

Outcome = dict[str, Any]
R = TypeVar("R", bound="Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table. `needs`: packages without which it cannot run."""

    name: str
    run: Callable[..., Any]
    shows: str = ""
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The file and the page of a benchmark.

    text       Markdown, from what the file holds ({"versions": …, "rows": {name: outcome}})
    section    the part of the page that `text` is; the whole page by default
    order      names of rows, in the order in which they are kept; the order in which they came by default
    """

    name: str
    page: Path
    text: Callable[[dict[str, Any]], str]
    section: str = ""
    order: Sequence[str] = ()
    packages: tuple[str, ...] = ("torch",)

    @property
    def results(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"versions": {}, "rows": {}}
        return json.loads(self.results.read_text()) if self.results.exists() else empty

    def add(self, name: str, outcome: Outcome) -> None:
        """Write a row's outcome to the file and to the page."""
        found = self.read()
        rows = {**found["rows"], name: outcome}
        installed = [package for package in self.packages if importlib.util.find_spec(package) is not None]
        data = {
            "command": f"python benchmarks/{self.name}.py",
            "versions": found["versions"] | {package: importlib.metadata.version(package) for package in installed},
            "rows": {key: rows[key] for key in self.order if key in rows} if self.order else rows,
        }
        part = self.results.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        part.replace(self.results)
        self.write_page()

    def write_page(self) -> None:
        self.page.write_text(self.page_text())

    def page_text(self) -> str:
        text = self.text(self.read())
        return fill(self.page.read_text(), {self.section: text}) if self.section else text


def fill(page: str, sections: Mapping[str, str]) -> str:
    """Return the page with these sections; the others stay."""
    known = {match["name"] for match in _SECTION.finditer(page)}
    if unknown := sections.keys() - known:
        raise SystemExit(f"the page has no section {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")

    def filled(match: re.Match[str]) -> str:
        name = match["name"]
        return f"{match[1]}{sections[name].strip()}{match[3] or chr(10)}{match[4]}" if name in sections else match[0]

    return _SECTION.sub(filled, page)


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Markdown. `right`: all columns but the first are numbers."""
    rule = "|---" + ("|---:" if right else "|---") * (len(head) - 1) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def arguments(description: str | None, *, limit_seconds: float | None = None) -> argparse.ArgumentParser:
    """Return the options that all these benchmarks have. `limit_seconds`: the default of --limit, if there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="A,B", help="rows of these names, or whose names contain them")
    if limit_seconds is not None:
        parser.add_argument("--limit", type=float, default=limit_seconds, help="seconds per training or script")
    parser.add_argument("--rest", action="store_true", help="only rows that have no outcome yet")
    return parser


def chosen(rows: Iterable[R], *, only: str, known: Iterable[str] = ()) -> list[R]:
    """Return the rows that were asked for and can run here. `known`: rows that are left out."""
    rows = [row for row in rows if row.name not in set(known)]
    if only:
        names = {row.name for row in rows}
        words = [word.strip() for word in only.split(",")]
        rows = [
            row
            for row in rows
            if any(row.name == word or (word not in names and word.lower() in row.name.lower()) for word in words)
        ]
    for row in rows:
        if row.missing():
            print(f"{row.name}: left out, not installed: {', '.join(row.missing())}", file=sys.stderr)
    return [row for row in rows if not row.missing()]


def run(
    rows: Iterable[R],
    *,
    report: Report,
    held: Callable[[Outcome], bool],
    line: Callable[[Outcome], str],
    each: Callable[[R], Outcome] = lambda row: row.run(),
) -> int:
    """Run rows, print a line for each, and return the exit code: 1 if one did not hold."""
    failed = []
    for row in rows:
        print(f"{row.name} {row.shows}".rstrip() + " …", flush=True)
        outcome = each(row)
        report.add(row.name, outcome)
        print(f"   {'ok   ' if held(outcome) else 'WRONG'} {line(outcome)}", flush=True)
        failed += [] if held(outcome) else [row.name]
    print(f"did not hold: {', '.join(failed)}" if failed else "every row held")
    return 1 if failed else 0
