"""A section of the page, and what several sections need of a bench."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.measure.bench.case_result import NOT_MEASURABLE, CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.markup import Child, Markup, element, join

SectionLook = Literal["whole", "half", "folded"]
"""The size of a section: the full width, half of it on a wide screen, or only the title until it is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """`anchor` is the address within the page, `short` the name in the table of contents."""

    anchor: str
    title: str
    short: str
    body: Markup
    look: SectionLook

    def markup(self) -> Markup:
        heading = element("h2", self.title)
        if self.look == "folded":
            inner = element("details", element("summary", heading), self.body)
        else:
            inner = join([heading, self.body])
        return element("section", inner, id=self.anchor, class_=self.look)


def section(
    anchor: str, title: str, *body: Child, short: str | None = None, look: SectionLook = "whole"
) -> PageSection:
    return PageSection(anchor=anchor, title=title, short=short or title, body=join(body), look=look)


def is_chosen(bench: Bench, case: CaseResult) -> bool:
    """Return whether this case is recommended; none is if the cases did not do the same training."""
    return bench.equivalence.agrees and bench.recommended is not None and case is bench.cases[bench.recommended]


def exposed_text(case: CaseResult) -> str:
    """Return the share of exposed communication; or that it is not measurable, or was not measured."""
    if case.exposed_seconds is None:
        return NOT_MEASURABLE if case.why_not_exposed == NOT_MEASURABLE else "–"
    return f"{case.exposed_seconds / case.seconds:.0%}"


def off_text(case: CaseResult) -> str:
    """Return the interquartile range; it is unknown for a single value."""
    off = None if case.step_seconds is None else case.step_seconds.off
    return "–" if off is None else f"±{off:.0%}"


def shown(value: Any) -> str:
    """Format a value of the settings as in a config."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {shown(one)}" for name, one in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(shown(one) for one in value) or "–"
    return str(value)
