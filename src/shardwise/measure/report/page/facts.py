"""The end of the page: what did not run and why, all settings, the machine, and how to run the bench again."""

from collections.abc import Mapping
from typing import Any

from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.markup import Markup, element, small, table
from shardwise.measure.report.page.section import PageSection, section, shown

_MOST_NAMED = 4


def absent_section(bench: Bench) -> PageSection | None:
    """List the cases that did not run, or did not run without communication."""
    rows = [[case.name, case.why_not] for case in bench.cases if not case.ran]
    rows += [
        [f"{case.name}, without communication", case.why_not_silent] for case in bench.cases if case.why_not_silent
    ]
    if not rows:
        return None
    named = ", ".join(name for name, _ in rows[:_MOST_NAMED])
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return section(
        "absent",
        f"Did not run: {named}{more}",
        table(["case", "why"], rows, words=2),
        short="Did not run",
        look="folded",
    )


def settings_section(bench: Bench) -> PageSection:
    """List everything that is needed to run the bench again; folded."""
    return section(
        "settings",
        "Settings, machine, and how to run this again",
        element("p", "Run the bench again, and write this page:"),
        element("pre", element("code", f"{bench.command}\nshardwise report DIR")),
        element(
            "div",
            _pairs("Settings of all cases", bench.settings),
            _pairs("Machine", {**bench.machine, "num_ranks": bench.num_ranks}),
            class_="columns",
        ),
        small(
            f"Made {bench.made}. All numbers of this page are in bench.json, in the folder of the bench, with every "
            "loss, block of steps, ledger and tape."
        ),
        short="Settings",
        look="folded",
    )


def _pairs(title: str, values: Mapping[str, Any]) -> Markup | None:
    if not values:
        return None
    rows = [[name, shown(value)] for name, value in values.items() if value is not None]
    return element("div", element("h3", title), table(["", ""], rows, words=2), class_="pairs")
