"""The picture of a step in a browser: it plays, stops, steps by one operation, and shows what the tape says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure.report.chromium import Page, needs_chromium, page
from measure.report.sample_bench import sample_bench

from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.measure.report.page.anatomy import anatomy_data
from shardwise.measure.report.page.document import page_of

pytestmark = needs_chromium

BENCH = sample_bench()
DATA: dict[str, Any] = json.loads(json.dumps(anatomy_data(BENCH)))
CAPTIONS = "[...document.querySelectorAll('.anatomy-caption strong')].map((one) => one.textContent)"
TITLES = {"update", "broadcast", "reduce flags"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(BENCH), encoding="utf-8")
    with page(path, width=1400) as opened:
        yield opened
        assert opened.errors == []
        assert opened.requests == []


def titles_of(strategy: str) -> list[str]:
    """What the captions are called, from the data: one an entry of the tape."""
    case = next(case for case in DATA["cases"] if case["name"] == strategy)
    pairs = [(DATA["kinds"][kind], case["subjects"][subject][0]) for kind, subject, *_ in case["frames"]]
    return ["the step begins", *(kind if kind in TITLES else f"{kind} {label}" for kind, label in pairs)]


def click(opened: Page, what: str) -> None:
    opened.evaluate(f"document.querySelector('.anatomy [data-do={what}]').click()")


def position(opened: Page) -> int:
    return int(opened.evaluate("document.querySelector('.anatomy-scrubber').value"))


def go(opened: Page, moment: int, *, value: str = "null") -> Any:
    """Go to a moment; return the value of an expression there, before any timer of the page has run."""
    scrub = f"(one) => {{ one.value = {moment}; one.dispatchEvent(new Event('input')); return {value}; }}"
    return opened.evaluate(f"({scrub})(document.querySelector('.anatomy-scrubber'))")


def choose(opened: Page, *, pane: int, strategy: str) -> None:
    choice = f"(one) => {{ one.value = '{strategy}'; one.dispatchEvent(new Event('change')); }}"
    opened.evaluate(f"({choice})(document.querySelectorAll('.anatomy-pane > select')[{pane}])")


def walk(opened: Page) -> list[list[str]]:
    """The captions of both panes, from the beginning to the end, one step after the other."""
    go(opened, 0)
    return opened.evaluate(
        f"""(() => {{
            const shown = [{CAPTIONS}], on = document.querySelector(".anatomy [data-do=on]");
            const scrubber = document.querySelector(".anatomy-scrubber");
            while (scrubber.value !== scrubber.max) {{ on.click(); shown.push({CAPTIONS}); }}
            return shown;
        }})()"""
    )


def press(opened: Page, key: str) -> None:
    event = f"new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }})"
    opened.evaluate(f"document.querySelector('.anatomy-panes').dispatchEvent({event})")


def distinct(values: list[str]) -> list[str]:
    """Without repetitions of what is still shown."""
    return [value for index, value in enumerate(values) if index == 0 or value != values[index - 1]]


def test_it_does_not_play_by_itself(opened: Page) -> None:
    assert position(opened) == 0
    assert opened.evaluate(CAPTIONS) == ["the step begins"] * 2
    chosen = "[...document.querySelectorAll('.anatomy-pane > select')].map((one) => one.value)"
    assert opened.evaluate(chosen) == ["ddp", "fsdp"]


def test_the_first_picture_is_right_at_once_and_changes_move(opened: Page) -> None:
    """A transition would start from cells that are full."""
    moving = """[".cell .own", ".anatomy-track i", ".cursor"].map(name => getComputedStyle(
        document.querySelector(".anatomy " + name)).transitionDuration !== "0s")"""
    home = "document.querySelector('.anatomy').classList"
    opened.evaluate(f"{home}.remove('moving')")
    assert opened.evaluate(moving) == [False] * 3
    go(opened, 1)
    assert opened.evaluate(f"{home}.contains('moving')")
    assert opened.evaluate(moving) == [True] * 3
    go(opened, 0)


def test_stepping_shows_every_operation_of_both_tapes_once_and_in_order(opened: Page) -> None:
    shown = walk(opened)
    for pane, strategy in enumerate(("ddp", "fsdp")):
        assert distinct([captions[pane] for captions in shown]) == titles_of(strategy)
    # Both are at the same computation at the same time.
    computes = ("forward", "backward", "update")
    assert all(captions[0] == captions[1] for captions in shown if captions[1].startswith(computes))


def test_a_step_back_is_one_operation_back(opened: Page) -> None:
    go(opened, 12)
    before = opened.evaluate(CAPTIONS)
    click(opened, "on")
    assert position(opened) == 13
    assert opened.evaluate(CAPTIONS) != before
    click(opened, "back")
    assert position(opened) == 12
    assert opened.evaluate(CAPTIONS) == before


def test_playing_goes_on_and_pausing_stops(opened: Page) -> None:
    go(opened, 0)
    opened.evaluate("document.querySelector('.anatomy-speed').value = '4'")
    opened.evaluate("document.querySelector('.anatomy-speed').dispatchEvent(new Event('change'))")
    click(opened, "play")
    while position(opened) < 2:
        opened.evaluate("new Promise((done) => setTimeout(done, 20))")
    press(opened, " ")
    at = position(opened)
    # Longer than any operation lasts at this speed.
    opened.evaluate("new Promise((done) => setTimeout(done, 700))")
    assert position(opened) == at


FOCUSES = {
    "nothing": "document.activeElement.blur()",
    "a link": "document.querySelector('nav a').focus()",
    "the scrubber": "document.querySelector('.anatomy-scrubber').focus()",
}


@pytest.mark.parametrize("focus", FOCUSES)
@pytest.mark.parametrize("top", [0, 1500])
def test_keys_work_without_focus_and_do_not_scroll(opened: Page, focus: str, top: int) -> None:
    """Keys as a keyboard sends them, with what the browser would do with them."""
    opened.evaluate(FOCUSES[focus])
    opened.evaluate(f"document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, {top})")
    before = opened.evaluate("scrollY")
    assert before == top
    go(opened, 5)
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    opened.press("ArrowLeft")
    assert position(opened) == 6
    if focus != "a link":
        opened.press(" ")
        assert opened.evaluate("document.querySelector('.anatomy').classList.contains('playing')")
        opened.press(" ")
        assert not opened.evaluate("document.querySelector('.anatomy').classList.contains('playing')")
    opened.evaluate("new Promise((done) => setTimeout(done, 150))")
    assert opened.evaluate("scrollY") == before
    opened.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def test_keys_of_a_choice_stay_its_own(opened: Page) -> None:
    go(opened, 5)
    opened.evaluate("document.querySelector('.anatomy-pane > select').focus()")
    opened.press("ArrowRight")
    assert position(opened) == 5
    opened.evaluate("document.activeElement.blur()")
    choose(opened, pane=0, strategy="ddp")


def test_bars_say_the_same_as_the_caption_and_stay_below_the_peak_of_the_page(opened: Page) -> None:
    """Of every moment of fsdp: the number is the sum of the pieces, and none is beyond the case's one peak."""
    case = next(case for case in BENCH.cases if case.name == "fsdp")
    go(opened, 0)
    shown = opened.evaluate(
        """(() => {
            const pane = document.querySelectorAll(".anatomy-pane")[1], shown = [];
            const on = document.querySelector(".anatomy [data-do=on]"), scrubber = document.querySelector(".anatomy-scrubber");
            for (;;) {
                const bar = pane.querySelector(".anatomy-bar"), track = bar.querySelector(".anatomy-track");
                shown.push([[...track.querySelectorAll("i")].reduce((sum, one) => sum + parseFloat(one.style.width), 0),
                    parseFloat(track.querySelector("b").style.left), bar.querySelector(".anatomy-value").textContent]);
                if (scrubber.value === scrubber.max) return shown;
                on.click();
            }
        })()"""
    )
    scale = max(case.peak_bytes for case in BENCH.cases if case.tape)
    for width, peak, text in shown:
        assert width <= peak + 1e-3
        assert peak == pytest.approx(100 * case.allocated_bytes[0] / scale, abs=1e-3)
        assert text == bytes_text(width / 100 * scale)
    label = opened.evaluate("document.querySelectorAll('.anatomy-curve')[1].textContent")
    assert f"peak of rank {case.peak_rank}: {bytes_text(case.peak_bytes)}" in label


@pytest.mark.parametrize(("key", "moves"), [("ArrowRight", 1), ("ArrowLeft", -1)])
def test_the_arrows_step(opened: Page, key: str, moves: int) -> None:
    go(opened, 5)
    press(opened, key)
    assert position(opened) == 5 + moves


def test_another_strategy_keeps_the_place_and_shows_its_own_tape(opened: Page) -> None:
    choose(opened, pane=0, strategy="zero2")
    assert distinct([captions[0] for captions in walk(opened)]) == titles_of("zero2")
    go(opened, 20)
    before = opened.evaluate(CAPTIONS)
    choose(opened, pane=1, strategy="shard_grad_op")
    choose(opened, pane=1, strategy="fsdp")
    assert opened.evaluate(CAPTIONS) == before
    choose(opened, pane=0, strategy="ddp")


def test_memory_is_that_of_the_tapes_row(opened: Page) -> None:
    """The last operation of ddp; widths are parts of the largest peak of all strategies."""
    go(opened, 10**6)
    case = DATA["cases"][0]
    expected = [sum(row[index] for row in case["memory"][0]) for index in range(len(DATA["categories"]))]
    widths = opened.evaluate(
        "[...document.querySelector('.anatomy-track').querySelectorAll('i')].map((one) => parseFloat(one.style.width))"
    )
    assert [width / sum(widths) for width in widths] == pytest.approx(
        [one / sum(expected) for one in expected], abs=1e-4
    )


def test_the_ring_plays_the_rounds_of_the_collective_under_way(opened: Page) -> None:
    go(opened, 1)
    rounds = opened.evaluate(
        """(() => {
            const ring = document.querySelectorAll(".anatomy-ring")[1], on = ring.querySelectorAll("button")[1];
            const shown = [ring.querySelectorAll(".chunk.whole").length];
            while (!on.disabled) { on.click(); shown.push(ring.querySelectorAll(".chunk.whole").length); }
            return shown;
        })()"""
    )
    # An all-gather on 4 ranks: each has its own chunk, and gets one more a round.
    assert rounds == [4, 8, 12, 16]


def test_a_slice_goes_around_the_ranks_that_have_the_same_one(tmp_path: Path) -> None:
    """The tape of fsdp on 4 ranks, as if they were 2 groups of 2: blocks.3 has its slice sent on."""
    case = next(case for case in BENCH.cases if (case.engine, case.strategy) == ("shardwise", "fsdp"))
    tape = list(case.tape)
    index = next(i for i, one in enumerate(tape) if (one.kind, one.subject) == ("wait reduce", "blocks.3"))
    tape[index + 1 : index + 1] = [replace(tape[index], kind=kind) for kind in ("reduce slice", "wait slice")]
    settings = {**BENCH.settings, "plan.mesh": {"replicate": 2, "shard": 2}}
    path = tmp_path / "hybrid.html"
    bench = replace(BENCH, cases=(replace(case, tape=tuple(tape)),), settings=settings)
    path.write_text(page_of(bench), encoding="utf-8")
    with page(path, width=1400) as hybrid:
        # Later the ring turns.
        middle = "document.querySelector('.anatomy-ring .middle').textContent"
        assert go(hybrid, index + 2, value=middle) == "all-reduce"
        assert hybrid.evaluate(CAPTIONS) == ["reduce slice blocks.3"] * 2
        labels = "[...document.querySelectorAll('.anatomy-ring')[0].querySelectorAll('.rank')]"
        assert hybrid.evaluate(f"{labels}.map((one) => one.textContent)") == ["rank 0", "rank 2"]
        go(hybrid, index + 3)
        assert hybrid.evaluate(CAPTIONS) == ["wait slice blocks.3"] * 2
        assert hybrid.errors == []


def test_a_link_may_name_a_moment(opened: Page) -> None:
    go(opened, 9)
    expected = opened.evaluate(CAPTIONS)
    opened.evaluate("location.hash = '#anatomy-9'")
    opened.call("Page.reload")
    opened.evaluate("new Promise((done) => setTimeout(done, 300))")
    while opened.evaluate("document.readyState") != "complete" or not opened.evaluate(
        "!!document.querySelector('.ready')"
    ):
        opened.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert position(opened) == 9
    assert opened.evaluate(CAPTIONS) == expected


def test_it_fits_a_phone(opened: Page) -> None:
    opened.look(width=390, dark=True)
    opened.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    tops = opened.evaluate("[...document.querySelectorAll('.anatomy-pane')].map((one) => one.offsetTop)")
    assert tops[1] > tops[0]
