"""docs/reliability.md: a frame (page.md) with sections, each of which one command writes.

<!-- section NAME -->        what stands between the two lines is written by a command; another command leaves it
<!-- end of NAME -->         as it is
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from reliability.findings import STRATEGIES, UNTESTED, Row
from reliability.ledger import CASES, OUTCOMES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
FRAME = Path(__file__).with_name("page.md")
_SECTION = re.compile(r"(<!-- section (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->\n)", re.DOTALL)


def fill(frame: str, *, page: str, sections: Mapping[str, str]) -> str:
    """The frame with these sections; the others are those of the page as it was."""
    kept = {match["name"]: _body(match) for match in _SECTION.finditer(page)}
    known = {match["name"] for match in _SECTION.finditer(frame)}
    if unknown := sections.keys() - known:
        raise ValueError(f"{FRAME.name} has no section {', '.join(sorted(unknown))}")

    def filled(match: re.Match[str]) -> str:
        body = sections.get(match["name"], kept.get(match["name"], _body(match)))
        return f"{match[1]}\n{body.strip()}\n\n{match[3]}"

    return _SECTION.sub(filled, frame)


def _body(match: re.Match[str]) -> str:
    return match[0].removeprefix(match[1]).removesuffix(match[3])


def write(sections: Mapping[str, str], *, path: Path = PAGE) -> None:
    page = path.read_text() if path.exists() else ""
    path.write_text(fill(FRAME.read_text(), page=page, sections=sections))


def cases_section(lists: Mapping[str, Sequence[Row]], *, torch_version: str) -> str:
    """How many cases have which outcome, and a table for each list. `lists`: title → rows."""
    rows = [row for of_list in lists.values() for row in of_list]
    shown = {outcome: {row.case for row in rows if row.outcome == outcome} for outcome in (*OUTCOMES, UNTESTED)}
    failed = {row.case for row in rows if not row.shown} - shown[UNTESTED]
    num_cases = len({row.case for row in rows})
    counts = ", ".join(f"{len(cases)} {outcome}" for outcome, cases in (*shown.items(), ("failed", failed)))
    summary = f"**{num_cases} cases: {counts}.** torch {torch_version}, Gloo on CPU."
    if sum(map(len, shown.values())) + len(failed) != num_cases:
        summary += " Some have one outcome under one strategy and another under others."
    return "\n\n".join([summary, *(f"## {title}\n\n{table(rows)}" for title, rows in lists.items())])


def table(rows: Sequence[Row]) -> str:
    """Each case has an anchor, so that it can be linked to, and so that a test finds it on the page."""
    lines = ["| what you do | under | outcome | the line |", "|---|---|---|---|"]
    lines += [
        f'| <a id="{row.case}"></a>{_cell(CASES[row.case])} | {_under(row.under)} | {_cell(row.outcome)} '
        f"| {_code(row.line)} |"
        for row in rows
    ]
    return "\n".join(lines)


def listed(page: str) -> dict[str, set[str]]:
    """Case → the outcomes that a page shows of it."""
    found: dict[str, set[str]] = {}
    for line in page.splitlines():
        if match := re.match(r'\| <a id="([\w-]+)"></a>.*', line):
            cells = re.split(r"(?<!\\)\|", line)
            found.setdefault(match[1], set()).add(cells[3].strip())
    return found


def _under(names: Sequence[str]) -> str:
    if not names:
        return "–"
    return "every strategy" if tuple(names) == STRATEGIES else ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(line: str) -> str:
    """A line as code, in which only a backtick and a table's bar mean something."""
    if not line:
        return ""
    fence = "``" if "`" in line else "`"
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return _cell(f"{fence}{pad}{line}{pad}{fence}")
