"""The planner page as Chromium shows it, and as the keyboard alone moves it. One browser for all tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.chromium import Page, needs_chromium, page

from shardwise.cli.plan_answer import PlanQuestion, answer
from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.report.planner_page.planner_document import catalogue_model, planner_page
from shardwise.sources import Source

pytestmark = needs_chromium

MODEL = "gpt2-124m"
BESIDE = """
[...document.querySelectorAll("main *")].filter((one) => !one.closest(".scroll, pre, svg svg"))
  .filter((one) => { const box = one.getBoundingClientRect(); return box.width && (box.left < -1 || box.right > innerWidth + 1); })
  .map((one) => one.outerHTML.slice(0, 120))
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("main *")]
  .filter((one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()) && one.getClientRects().length
                   && !["TITLE", "SCRIPT"].includes(one.tagName.toUpperCase()))
  .map((one) => parseFloat(getComputedStyle(one).fontSize)))
"""
UNLABELLED = """
[...document.querySelectorAll("input, select, button")].filter((one) => one.getClientRects().length)
  .filter((one) => !(one.labels?.length || one.textContent.trim() || one.ariaLabel)).map((one) => one.outerHTML)
"""
FOCUS = """
(() => {
  const one = document.activeElement, shown = one.matches("[type=radio]") ? one.nextElementSibling : one, style = getComputedStyle(shown);
  return [one.id || one.dataset.strategy || one.name || one.tagName, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
})()
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("planner") / "planner.html"
    start = {"model": MODEL, "device": "h100-80gb", "gpus": 8}
    path.write_text(planner_page([catalogue_model(MODEL)], start=start, server=None), encoding="utf-8")
    with page(path) as one:
        yield one
        assert one.errors == []
        assert one.requests == [], "the page asks the network for nothing"


def go(opened: Page, settings: str) -> None:
    """Open the page's address with these settings, and wait until nothing is computed any more."""
    opened.evaluate(
        f"(async () => {{ const before = plannerPage.shown; location.hash = '#{settings}';"
        " while (plannerPage.shown === before) await new Promise((done) => setTimeout(done, 5));"
        " await plannerPage.settled; })()"
    )


def text(opened: Page, selector: str) -> str:
    return str(opened.evaluate(f"document.querySelector('{selector}').textContent"))


def press(opened: Page, key: str, *, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
    opened.evaluate("plannerPage.settled")


def test_page_fits_every_screen_in_light_and_dark(opened: Page) -> None:
    go(opened, f"model={MODEL}&device=a100-80gb&gpus=64&batch=8&recompute=full&seq=512")
    papers = set()
    for width, dark in ((1400, False), (1400, True), (390, True), (390, False)):
        opened.look(width=width, dark=dark)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.evaluate(BESIDE) == []
        papers.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2, "light and dark are not the same"
    assert opened.evaluate(SMALLEST_TEXT) >= 11
    opened.look(width=1400)


def test_every_control_has_a_label_and_is_reached_and_moved_by_the_keyboard_alone(opened: Page) -> None:
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=4&batch=2&seq=512&recompute=none&budget=40")
    assert opened.evaluate(UNLABELLED) == []
    opened.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    state: dict[str, Any] = {}
    while "fsdp" not in reached and len(reached) < 30:
        press(opened, "Tab", code=9)
        name, is_visible = opened.evaluate(FOCUS)
        reached.append(name)
        assert is_visible, f"{name}: the focus cannot be seen"
        if name in ("gpus", "batch", "seq", "recompute", "host", "budget"):
            press(opened, "ArrowRight", code=39)
            state = opened.evaluate("plannerPage.state")
    assert reached[:2] == ["download", "copy"]
    assert reached[2:11] == ["model", "config", "device", "gpus", "batch", "seq", "recompute", "host", "budget"]
    assert reached[11:13] == ["tokens", "price"]
    assert reached[13:] == ["zero2", "shard_grad_op", "fsdp"]
    moved = {name: state[name] for name in ("gpus", "batch", "seq", "recompute", "host", "budget")}
    assert moved == {"gpus": 5, "batch": 3, "seq": 768, "recompute": "selective", "host": "states", "budget": 41}
    press(opened, "Enter", code=13)
    opened.call("Input.dispatchKeyEvent", type="char", text="\r")
    assert opened.evaluate("document.activeElement.ariaPressed") == "true"
    assert text(opened, "#step-title") == "One step of fsdp"


def test_link_holds_all_settings(opened: Page) -> None:
    asked = f"model={MODEL}&device=a100-40gb&gpus=4&batch=6&recompute=selective&seq=768&budget=20&plan=zero2"
    go(opened, asked)
    assert opened.evaluate("location.hash.slice(1)") == asked
    assert text(opened, "#title") == f"{MODEL} on 4 × NVIDIA A100 SXM4 40 GB"
    assert opened.evaluate("document.getElementById('seq').getAttribute('aria-valuetext')") == "768 tokens"
    go(opened, "model=nothing&device=x&gpus=-3&batch=many&recompute=y&seq=1e9&budget=0&plan=z&host=toString")
    state = opened.evaluate("plannerPage.state")
    assert (state["model"], state["recompute"], state["batch"], state["budget"]) == (MODEL, "none", None, None)
    assert state["host"] == "none"


def test_tokens_and_a_price_give_days_and_a_cost(opened: Page) -> None:
    asked = f"model={MODEL}&device=h100-80gb&gpus=8&batch=8&recompute=none&seq=1024"
    go(opened, asked)
    assert "Training time" not in text(opened, "#numbers")
    go(opened, f"{asked}&tokens=10B&price=2.5")
    assert opened.evaluate("location.hash.slice(1)") == f"{asked}&tokens=10B&price=2.5"
    assert "--tokens 10B --price 2.5 --save" in text(opened, "#command")
    own = text(opened, "#numbers")
    assert "Training time" in own
    assert "Cost$" in own
    go(opened, f"{asked}&tokens=10B")
    assert text(opened, "#numbers") != own, "without a price the listed one counts"
    assert "runpod.io/pricing" in text(opened, "#price-note")
    go(opened, f"{asked}&tokens=many&price=-1")
    assert "Training time" not in text(opened, "#numbers")


def test_download_is_the_file_that_plan_save_writes(opened: Page, tmp_path: Path) -> None:
    go(opened, f"model={MODEL}&device=v100-16gb&gpus=8&recompute=full&budget=12")
    question = PlanQuestion(
        source=Source(MODEL),
        plan=Plan(precision="bf16", recompute="full"),
        strategy="all",
        cluster=cluster_of("8xv100-16gb"),
        optimizer="adamw",
        goal="throughput",
        budget_bytes=12 * 2**30,
    )
    found = answer(question)
    found.save(tmp_path / "plan.toml")
    assert opened.evaluate("plannerPage.plan()") == (tmp_path / "plan.toml").read_text()
    assert found.recommendation.best is not None
    assert text(opened, "#verdict em") == found.recommendation.best.name
    command = text(opened, "#command")
    assert command == f"shardwise plan {MODEL} --cluster 8xv100-16gb --recompute full --budget 12GiB --save plan.toml"


def test_what_does_not_fit_is_refused_with_a_way_out(opened: Page) -> None:
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=1&batch=32&seq=1024&recompute=none&budget=10")
    assert text(opened, "#verdict h2") == "Nothing fits with these settings"
    asked = f"shardwise plan {MODEL} --cluster 1xh100-80gb --micro-batch 32 --budget 10GiB"
    assert text(opened, "#also").endswith(f"{asked} --strategy auto --save plan.toml")
    assert text(opened, "#lora-command") == f"{asked} --lora 16 --quantize nf4 --save plan.toml"
    assert opened.evaluate("document.getElementById('download').disabled")
    opened.evaluate("document.querySelector('#ways button').click(); plannerPage.settled")
    assert text(opened, "#verdict h2").startswith("Use ")
    assert not opened.evaluate("document.getElementById('download').disabled")


def test_states_in_host_memory_are_a_choice_on_one_node(opened: Page, tmp_path: Path) -> None:
    asked = f"model={MODEL}&device=h100-80gb&gpus=1&batch=8&recompute=full"
    go(opened, asked)
    assert "Host memory per node" not in text(opened, "#numbers")
    opened.evaluate(
        "const host = document.getElementById('host'); host.value = 'backward';"
        " host.dispatchEvent(new Event('change')); plannerPage.settled"
    )
    assert opened.evaluate("location.hash.slice(1)") == f"{asked}&host=backward&seq=1024"
    question = PlanQuestion(
        source=Source(MODEL),
        plan=Plan(precision="bf16", recompute="full", offload_states=True, update="backward", micro_batch=8),
        strategy="all",
        cluster=cluster_of("1xh100-80gb"),
        optimizer="adamw",
        goal="throughput",
    )
    found = answer(question)
    found.save(tmp_path / "plan.toml")
    best = found.recommendation.best
    assert best is not None
    assert opened.evaluate("plannerPage.plan()") == (tmp_path / "plan.toml").read_text()
    assert text(opened, "#verdict em") == best.name
    assert f"Host memory per node{best.node_host_bytes / 2**30:.1f} GiB" in text(opened, "#numbers")
    assert "--recompute full --offload states --update backward --micro-batch 8" in text(opened, "#command")
    lanes = opened.evaluate("[...document.querySelectorAll('#step-chart .label')].map((one) => one.textContent)")
    assert lanes == ["compute", "host", "loads"]
    go(opened, f"{asked.replace('gpus=1', 'gpus=16')}&host=states")
    assert opened.evaluate("plannerPage.state.host") == "none"
    assert "For up to 8 GPUs" in text(opened, "#host-note")


def test_where_nothing_fits_host_memory_and_more_devices_are_ways_out(opened: Page) -> None:
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=1&batch=1&recompute=full&budget=4")
    assert text(opened, "#verdict h2") == "Nothing fits with these settings"
    buttons = opened.evaluate("[...document.querySelectorAll('#ways button')].map((one) => one.textContent)")
    assert buttons == ["Use states in host memory", "Use 2 GPUs"]
    assert "of host memory; or with 2 GPUs" in text(opened, "#also")
    opened.evaluate("document.querySelector('#ways button').click(); plannerPage.settled")
    assert opened.evaluate("plannerPage.state.host") == "states"
    assert text(opened, "#verdict h2").startswith("Use ")


def test_dropped_config_is_refused_with_the_command_that_traces_it(opened: Page) -> None:
    opened.evaluate("""(() => {
      const given = new DataTransfer();
      given.items.add(new File(["{}"], "config.json"));
      document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
    })()""")
    assert "shardwise plan --serve" in text(opened, "#config-note")


def test_bars_timeline_and_verdict_follow_a_slider_within_50_ms(opened: Page) -> None:
    """The quickest of 16, each at another micro-batch: others share the machine."""
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=8&seq=1024")
    shown = opened.evaluate("""(() => {
      const slider = document.getElementById("batch"), found = [];
      for (let index = 1; index <= 16; index++) {
        slider.value = index;
        slider.dispatchEvent(new Event("input"));
        const text = document.querySelector("#numbers").textContent + document.querySelector("#step-chart").textContent;
        found.push([plannerPage.shown.milliseconds, text]);
      }
      return found;
    })()""")
    assert len({text for _, text in shown}) == 16, "each is drawn"
    assert min(milliseconds for milliseconds, _ in shown) < 50


OVERLAPPING = """
["#frontier-chart .tick", "#frontier-chart .name", "#step-chart .tick"].flatMap((selector) => {
  const boxes = [...document.querySelectorAll(selector)].map((one) => [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([name, box], index) => boxes.slice(index + 1)
    .filter(([, other]) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom)
    .map(([other]) => `${name} and ${other}`));
})
"""


def test_texts_of_charts_do_not_overlap_on_a_phone(opened: Page) -> None:
    for width in (390, 1280):
        opened.look(width=width)
        for gpus in (1, 8, 64):
            go(opened, f"model={MODEL}&device=a100-80gb&gpus={gpus}&batch={2 * gpus}")
            assert opened.evaluate("document.querySelectorAll('#frontier-chart .tick').length") >= 3
            assert opened.evaluate(OVERLAPPING) == [], (width, gpus)


def test_a_bar_that_is_cut_carries_a_mark(opened: Page) -> None:
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=8&batch=4")
    assert opened.evaluate("document.querySelectorAll('.cut').length") == 0
    # A budget of 1 GiB: bars end at two and a half times of it.
    go(opened, f"model={MODEL}&device=h100-80gb&gpus=8&batch=64&budget=1")
    assert opened.evaluate("document.querySelectorAll('.cut').length") > 0
    assert "the bar goes on to" in str(opened.evaluate("document.querySelector('.cut').textContent"))
