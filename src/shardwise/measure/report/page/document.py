"""The page of a bench: all sections, in their order."""

from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page import anatomy
from shardwise.measure.report.page.facts import absent_section, settings_section
from shardwise.measure.report.page.forecast import prediction_section, scaling_section
from shardwise.measure.report.page.head import cases_section, heading, tiles, verdict
from shardwise.measure.report.page.html_document import asset, html_document
from shardwise.measure.report.page.markup import Markup, data_script, element
from shardwise.measure.report.page.memory import peak_section, step_section
from shardwise.measure.report.page.section import PageSection, section
from shardwise.measure.report.page.speed import split_section, throughput_section
from shardwise.measure.report.page.timeline import timeline_section
from shardwise.measure.report.page.training import loss_section

SECTIONS = (
    cases_section,
    peak_section,
    throughput_section,
    split_section,
    loss_section,
    timeline_section,
    step_section,
    prediction_section,
    scaling_section,
    absent_section,
    settings_section,
)
"""The sections after the verdict and the anatomy, in the order of the page; each returns None if it has no data."""


def page_of(bench: Bench) -> str:
    """Return the page of a bench. Text of the bench cannot become markup (markup.py), and no script in it would run."""
    found = anatomy.anatomy_data(bench)
    style = asset("page.css")
    scripts: list[str] = []
    sections = [make(bench) for make in SECTIONS]
    if found is not None:
        style = f"{style}\n{anatomy.STYLE}"
        scripts.append(anatomy.SCRIPT)
        # The script fills in the empty section.
        drawn = Markup(asset("anatomy.html")), data_script(found, id_="anatomy-data")
        sections.insert(0, section("anatomy", "Anatomy of a step", *drawn, short="Anatomy"))
    shown = [one for one in sections if one is not None]
    if any(one.anchor == "timeline" for one in shown):
        scripts.append(asset("timeline.js"))
    return html_document(f"{bench.name} – Shardwise bench", _main(bench, shown), style=style, scripts=scripts)


def _main(bench: Bench, sections: list[PageSection]) -> Markup:
    links = (element("a", one.short, href=f"#{one.anchor}") for one in sections)
    return element(
        "main",
        _hatch(),
        heading(bench),
        verdict(bench),
        tiles(bench),
        element("nav", *links, aria_label="Contents"),
        element("div", *(one.markup() for one in sections), class_="sections"),
    )


def _hatch() -> Markup:
    """Return the pattern of exposed communication, so that it can be recognised without colours."""
    lines = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="hatch")
    pattern = element(
        "pattern", element("rect", width=6, height=6, class_="hatched"), lines,
        id="hatch", width=6, height=6, patternUnits="userSpaceOnUse",
    )  # fmt: skip
    return element("svg", element("defs", pattern), class_="patterns", aria_hidden="true")
