"""A section of the page, and what all of them ask of a bench."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.bench.results import Bench, CaseResult
from shardwise.report.page.markup import Child, Markup, element, join


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """`anchor` is its address within the page, `short` its name in the list of contents."""

    anchor: str
    title: str
    short: str
    body: Markup

    def markup(self) -> Markup:
        return element("section", element("h2", self.title), self.body, id=self.anchor)


def section(anchor: str, title: str, *body: Child, short: str | None = None) -> PageSection:
    return PageSection(anchor=anchor, title=title, short=short or title, body=join(body))


def cases_that_ran(bench: Bench) -> list[CaseResult]:
    return [case for case in bench.cases if case.ran]


def is_chosen(bench: Bench, case: CaseResult) -> bool:
    """Of cases that are not the same training none is."""
    return bench.equivalence.agrees and bench.recommended is not None and case is bench.cases[bench.recommended]


def ranks_text(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks:,} ranks"


def shown(value: Any) -> str:
    """A value of the settings as a config would have it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {shown(one)}" for name, one in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(shown(one) for one in value) or "–"
    return str(value)
