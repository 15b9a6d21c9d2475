"""The planner page as an HTML document: with controls, for its server, or with one answer, to be kept as a file."""

from typing import Any

from shardwise.measure.report.page.html_document import asset, html_document
from shardwise.measure.report.page.markup import Markup, data_script

_PACKAGE = "shardwise.measure.report.planner_page"
_CONTROLS = "<!-- controls -->"


def planner_page(offers: dict[str, Any]) -> str:
    """Return the page with controls: models, devices, and the settings that it opens with."""
    return _document({"offers": offers}, controls=asset("controls.html", package=_PACKAGE), scripts=("page.js",))


def saved_page(answer: dict[str, Any]) -> str:
    """Return one answer of the server as a file without controls, which needs no server and no network."""
    return _document({"saved": answer}, controls="", scripts=("saved.js",))


def _document(data: dict[str, Any], *, controls: str, scripts: tuple[str, ...]) -> str:
    return html_document(
        "Shardwise planner",
        Markup(asset("page.html", package=_PACKAGE).replace(_CONTROLS, controls)),
        data_script(data, id_="planner-data"),
        style=asset("page.css") + asset("planner.css", package=_PACKAGE),
        scripts=[asset(name, package=_PACKAGE) for name in ("charts.js", "view.js", *scripts)],
        connects_to_server=bool(controls),
    )
