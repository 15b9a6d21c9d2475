"""The page as Chromium shows it. One browser for all looks of a page: each start takes a second."""

from dataclasses import replace
from pathlib import Path

import pytest
from measure.report.chromium import needs_chromium, page
from measure.report.sample_bench import sample_bench

from shardwise.measure.bench.results import Difference, Equivalence
from shardwise.measure.report.page.document import page_of

pytestmark = needs_chromium

NAME = "<script>document.title = 'mine'</script>" + "of_a_name_that_never_ends/" * 9

SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("main *")]
  .filter(one => [...one.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())
                 && one.getClientRects().length && !one.closest(".anatomy") && !["TITLE", "SCRIPT", "STYLE"].includes(one.tagName.toUpperCase()))
  .map(one => parseFloat(getComputedStyle(one).fontSize)))
"""
BESIDE = """
[...document.querySelectorAll("main section > *, main .chart *")]
  .filter(one => !one.closest(".scroll, pre, nav, .over, defs, .anatomy, svg svg"))
  .filter(one => { const box = one.getBoundingClientRect(); return box.width && (box.left < -1 || box.right > innerWidth + 1) })
  .map(one => one.outerHTML.slice(0, 120))
"""


def test_page_fits_every_screen_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    bench = sample_bench(name=NAME)
    path = tmp_path / "report.html"
    path.write_text(page_of(bench), encoding="utf-8")
    with page(path, width=1400) as opened:
        papers = set()
        for width, dark in ((1400, False), (1400, True), (390, True), (390, False)):
            opened.look(width=width, dark=dark)
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.evaluate(BESIDE) == []
            papers.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(papers) == 2, "light and dark are not the same"
        assert opened.evaluate(SMALLEST_TEXT) >= 11
        assert opened.evaluate("document.title").startswith("<script>")
        opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390, "open tables scroll in their own box"
        assert opened.errors == []
        assert opened.requests == []


def test_refusal_is_a_box_in_red(tmp_path: Path) -> None:
    equivalence = Equivalence(differences=(Difference(case="zero2", text="differs", excess=9.0),), largest=9.0)
    bench = replace(sample_bench(), equivalence=equivalence, recommended=None, why="")
    path = tmp_path / "report.html"
    path.write_text(page_of(bench), encoding="utf-8")
    with page(path, width=390) as opened:
        colour = opened.evaluate("getComputedStyle(document.querySelector('[role=alert] h2')).color")
        red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
        assert red > 2 * green
        assert red > 2 * blue
        assert opened.errors == []


def test_peak_in_a_row_in_which_nothing_was_issued_is_in_the_anatomy(tmp_path: Path) -> None:
    """As measured ledgers have it: the highest row may be the one after the forward of the root."""
    bench = sample_bench()
    case = next(case for case in bench.cases if case.name == "ddp")
    issued = {one.row for one in case.tape}
    silent = next(row for row in range(len(case.ledgers[0].entries) - 1, 0, -1) if row not in issued)
    entries = list(case.ledgers[0].entries)
    entries[silent] = replace(entries[silent], num_bytes={**entries[silent].num_bytes, "activations": 2**30})
    ledgers = (replace(case.ledgers[0], entries=tuple(entries)),) * bench.num_ranks
    sizes = tuple(ledger.peak.total_bytes for ledger in ledgers)
    path = tmp_path / "report.html"
    path.write_text(
        page_of(replace(bench, cases=(replace(case, ledgers=ledgers, allocated_bytes=sizes),))), encoding="utf-8"
    )
    with page(path) as opened:
        assert "peak of rank 0: 1.0" in opened.evaluate("document.querySelector('.anatomy').textContent")
        assert opened.errors == []


def test_page_is_about_four_screens_long_with_the_verdict_and_the_anatomy_on_the_first(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(sample_bench()), encoding="utf-8")
    with page(path, width=1400) as opened:
        opened.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert opened.evaluate("document.documentElement.scrollHeight") <= 4.2 * 900
        tops = opened.evaluate(
            "['.answer', '.tiles', '#anatomy', '#numbers', '#settings']"
            ".map(one => document.querySelector(one).getBoundingClientRect().top)"
        )
        assert tops == sorted(tops)
        assert tops[2] < 600
        assert opened.evaluate("document.querySelector('#settings details').open") is False


TIMELINE = """(() => {
  const pane = document.querySelector(".window"), block = document.querySelector(".zoomed rect:not(.lane)");
  return { wide: block.getBoundingClientRect().width, window: pane.clientWidth, scroll: pane.scrollWidth, left: pane.scrollLeft,
    label: document.querySelector(".zoomed .lanes .bar .label").getBoundingClientRect().left,
    shown: document.querySelector(".zoom output").textContent,
    ticks: [...document.querySelectorAll(".time-axis text")].map(one => parseFloat(one.textContent)) };
})()"""


def test_timeline_zooms_by_buttons_and_keys_within_its_own_window(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(sample_bench()), encoding="utf-8")
    with page(path, width=1400) as opened:
        for width in (1400, 390):
            opened.look(width=width)
            opened.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            before = opened.evaluate(TIMELINE)
            assert before["shown"] == "1×"
            assert before["scroll"] == before["window"]
            opened.evaluate("document.querySelector('[data-zoom=in]').click()")
            opened.press("+")
            zoomed = opened.evaluate(TIMELINE)
            assert zoomed["shown"] == "4×"
            assert zoomed["wide"] == pytest.approx(4 * before["wide"], rel=0.01)
            assert zoomed["scroll"] > 3 * zoomed["window"]
            assert zoomed["left"] > 0, "the middle stays in the middle"
            assert zoomed["label"] == before["label"], "labels stay in sight"
            assert before["ticks"][-1] <= zoomed["ticks"][-1] < 2 * before["ticks"][-1], "the same axis"
            assert len(zoomed["ticks"]) > 2 * len(before["ticks"]), "with more numbers"
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            opened.press("-")
            assert opened.evaluate(TIMELINE)["shown"] == "2×"
            opened.press("0")
            after = opened.evaluate(TIMELINE)
            assert (after["shown"], after["ticks"]) == ("1×", before["ticks"])
        assert opened.errors == []
        assert opened.requests == []
