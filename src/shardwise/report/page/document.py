"""The whole document, in its order."""

from importlib.resources import files

from shardwise.bench.results import Bench
from shardwise.report.page import anatomy
from shardwise.report.page.content_policy import content_policy
from shardwise.report.page.facts import absent_section, settings_section
from shardwise.report.page.forecast import prediction_section, scaling_section
from shardwise.report.page.head import cases_section, heading, tiles, verdict
from shardwise.report.page.markup import Markup, data_script, element
from shardwise.report.page.memory import peak_section, step_section
from shardwise.report.page.section import PageSection, section
from shardwise.report.page.speed import split_section, throughput_section
from shardwise.report.page.timeline import SCRIPT as TIMELINE_SCRIPT
from shardwise.report.page.timeline import timeline_section
from shardwise.report.page.training import loss_section

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
"""After the verdict and the anatomy, in the order of the page; one that has no data gives None."""


def page_of(bench: Bench) -> str:
    """The page of a bench. Text of the bench cannot become markup (markup.py), nor could it run if it did."""
    found = anatomy.anatomy_data(bench)
    style = files("shardwise.report.page").joinpath("page.css").read_text(encoding="utf-8")
    scripts: list[str] = []
    sections = [make(bench) for make in SECTIONS]
    if found is not None:
        style = f"{style}\n{anatomy.STYLE}"
        scripts.append(anatomy.SCRIPT)
        drawn = Markup(anatomy.anatomy_markup()), data_script(found, id_="anatomy-data")
        sections.insert(0, section("anatomy", "Anatomy of a step", *drawn, short="Anatomy"))
    shown = [one for one in sections if one is not None]
    if any(one.anchor == "timeline" for one in shown):
        scripts.append(TIMELINE_SCRIPT)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=content_policy(style, scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{bench.name} – Shardwise bench"),
        element("style", Markup(style)),
    )
    body = element("body", _main(bench, shown), *(element("script", Markup(script)) for script in scripts))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


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
    """The pattern of what is exposed, so that it does not hang on its colour alone."""
    lines = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="hatch")
    pattern = element(
        "pattern", element("rect", width=6, height=6, class_="hatched"), lines,
        id="hatch", width=6, height=6, patternUnits="userSpaceOnUse",
    )  # fmt: skip
    return element("svg", element("defs", pattern), class_="patterns", aria_hidden="true")
