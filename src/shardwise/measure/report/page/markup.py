"""HTML elements. Everything that is not Markup is text, and is escaped here."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Markup(str):
    """HTML that has been escaped, or was written by us."""

    __slots__ = ()


Child = str | None
"""Text or Markup; None is left out."""

_VOID = ("meta",)


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Return an element, as in `element("td", text, class_="number")`.

    In names of attributes a final `_` is dropped, and others become hyphens. Attributes that are None are left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else _short(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    return Markup("".join(one if isinstance(one, Markup) else escape(one) for one in children if one is not None))


def data_script(data: Any, *, id_: str) -> Markup:
    """Return data for a script, as JSON that cannot end its element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", Markup(text), type="application/json", id=id_)


def table(header: Sequence[Child], rows: Iterable[Sequence[Child]], *, words: int = 1) -> Markup:
    """Return a table that scrolls if it is too wide; its first `words` columns (1 or 2) are text, the rest numbers."""

    def line(tag: str, cells: Sequence[Child]) -> Markup:
        return element("tr", *(element(tag, cell) for cell in cells))

    head = element("thead", line("th", header))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", head, body, class_=f"words-{words}"), class_="scroll", tabindex="0")


def numbers_below(rows: Markup, *notes: str, what: str = "Numbers") -> Markup:
    """Return the table of a chart and notes on how it was measured, folded."""
    return element("details", element("summary", what), rows, *map(small, notes))


def small(*children: Child) -> Markup:
    """Return a paragraph in small print."""
    return element("p", *children, class_="small")


def title_of(text: str) -> Markup:
    """Return the text that a browser shows at the pointer."""
    return element("title", text)


def percent(value: float) -> str:
    """Return a length of SVG as a share of the chart's width."""
    return f"{_short(100 * value)}%"


def _short(value: float) -> str:
    return re.sub(r"\.?0+$", "", f"{value:.3f}")
