"""The planner page as Chromium shows it, and as the keyboard alone moves it. One browser and one server for all tests."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from measure.report.chromium import Page, needs_chromium, page

from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_service import PlanService
from shardwise.measure.report.planner_page.planner_server import PlannerServer

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
def service() -> PlanService:
    return PlanService(PlanOptions(model=MODEL, cluster="8xh100-80gb"))


@pytest.fixture(scope="module")
def opened(service: PlanService) -> Iterator[Page]:
    with PlannerServer(service.answers, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with page(server.address) as one:
                one.evaluate("plannerPage.settled")
                yield one
                assert one.errors == []
                assert all(url.startswith(server.address) for url in one.requests if "favicon" not in url)
        finally:
            server.shutdown()
            thread.join()


def go(opened: Page, settings: str) -> None:
    """Open the page's address with these settings, and wait until nothing is asked any more."""
    opened.evaluate(
        f"(async () => {{ const before = plannerPage.shown; location.hash = '#{settings}';"
        " await new Promise((done) => setTimeout(done, 20)); await plannerPage.settled; })()"
    )


def text(opened: Page, selector: str) -> str:
    return str(opened.evaluate(f"document.querySelector('{selector}').textContent"))


def press(opened: Page, key: str, *, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
    opened.evaluate("plannerPage.settled")


def test_page_fits_every_screen_in_light_and_dark(opened: Page) -> None:
    go(opened, "cluster=8x8xa100-80gb&micro_batch=8&recompute=full&seq=512")
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
    go(opened, "cluster=4xh100-80gb&micro_batch=2&seq=512&budget=40GiB")
    assert opened.evaluate(UNLABELLED) == []
    opened.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    while "fsdp" not in reached and len(reached) < 30:
        press(opened, "Tab", code=9)
        name, is_visible = opened.evaluate(FOCUS)
        reached.append(name)
        assert is_visible, f"{name}: the focus cannot be seen"
        if name in ("gpus", "batch", "seq", "recompute", "host", "budget"):
            press(opened, "ArrowRight", code=39)
    assert reached[:5] == ["download", "copy", "save", "target", "export"]
    assert reached[5:13] == ["model", "device", "gpus", "batch", "seq", "precision", "recompute", "host"]
    assert reached[13:] == ["budget", "tokens", "price", "zero2", "shard_grad_op", "fsdp"]
    state = opened.evaluate("plannerPage.state")
    moved = {"cluster": "5xh100-80gb", "micro_batch": "3", "seq": "768", "recompute": "none", "budget": "41GiB"}
    assert {name: state[name] for name in moved} == moved
    assert (state["offload"], state["update"]) == ("states", "")
    press(opened, "Enter", code=13)
    opened.call("Input.dispatchKeyEvent", type="char", text="\r")
    opened.evaluate("plannerPage.settled")
    assert opened.evaluate("document.activeElement.ariaPressed") == "true"
    assert text(opened, "#step-title") == "One step of fsdp"


def test_page_shows_the_answer_of_its_address(opened: Page, service: PlanService) -> None:
    asked = "model=gpt2-124m&cluster=4xa100-40gb&recompute=selective&seq=768&micro_batch=6&budget=20GiB&chosen=zero2"
    go(opened, asked)
    assert dict(pair.split("=") for pair in opened.evaluate("location.hash.slice(1)").split("&")) == dict(
        pair.split("=") for pair in asked.split("&")
    )
    assert text(opened, "#title") == f"{MODEL} on 4 × NVIDIA A100 SXM4 40 GB"
    assert opened.evaluate("document.getElementById('seq').getAttribute('aria-valuetext')") == "768 tokens"
    answer = service.answer(dict(pair.split("=") for pair in asked.split("&")))
    shown = opened.evaluate("JSON.stringify(plannerPage.shown)")
    assert {name: json.loads(shown)[name] for name in answer} == json.loads(json.dumps(answer))
    best = answer["plan"]["candidates"][answer["plan"]["recommended"]]
    assert text(opened, "#verdict em") == best["strategy"]
    assert text(opened, "#command") == answer["command"]
    assert text(opened, "#toml") == answer["files"][answer["chosen"]]
    assert text(opened, "#step-title") == "One step of zero2"
    peaks = opened.evaluate(
        "[...document.querySelectorAll('#memory-chart .value')].map((one) => one.firstChild.textContent)"
    )
    rows = [answer["plan"]["candidates"][row] for row in answer["rows"]]
    assert peaks == [f"{row['peak_bytes']['device'] / 2**30:.1f} GiB" for row in rows]


def test_mistake_in_the_address_is_said_in_the_page(opened: Page) -> None:
    go(opened, "cluster=4xh200&seq=999999")
    assert text(opened, "#verdict h2") == "This cannot be planned"
    assert text(opened, "#why") == f"--seq 999999: {MODEL} has no laws for samples of this length"
    go(opened, "colour=red")
    assert "colour" in text(opened, "#why")
    # The browser logs each refused request.
    assert all("400 (Bad Request)" in line for line in opened.errors)
    opened.errors.clear()
    go(opened, "cluster=4xh200")
    assert text(opened, "#verdict h2").startswith("Use ")


def test_a_model_of_ones_own_is_given_by_its_folder(opened: Page, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))

    def give(folder: str) -> None:
        choose = (
            "const pick = document.getElementById('model'); pick.value = ''; pick.dispatchEvent(new Event('change'));"
        )
        opened.evaluate(f"(() => {{ {choose} }})()")
        assert opened.evaluate("document.activeElement.id") == "folder"
        write = f"const field = document.activeElement; field.value = {json.dumps(folder)};"
        opened.evaluate(f"(() => {{ {write} field.dispatchEvent(new Event('change')); }})()")
        opened.evaluate("plannerPage.settled")

    give(f" hf:{tmp_path} ")
    assert opened.evaluate("plannerPage.shown.plan.model") == f"hf:{tmp_path}"
    assert opened.evaluate("document.getElementById('model').value") == f"hf:{tmp_path}"
    assert opened.evaluate("document.getElementById('folder').hidden")
    give(f"hf:{tmp_path}/none")
    assert f"{tmp_path}/none" in opened.evaluate("document.querySelector('main').innerText")
    opened.errors.clear()
    opened.evaluate("location.hash = ''")
    opened.evaluate("plannerPage.settled")


def test_tokens_and_a_price_give_days_and_a_cost(opened: Page) -> None:
    asked = "cluster=8xh100-80gb&micro_batch=8&seq=1024"
    go(opened, asked)
    assert "Training time" not in text(opened, "#numbers")
    go(opened, f"{asked}&tokens=10B&price=2.5")
    assert text(opened, "#command").endswith("--tokens 10B --price 2.5")
    own = text(opened, "#numbers")
    assert "Training time" in own
    assert "Cost$" in own
    go(opened, f"{asked}&tokens=10B")
    assert text(opened, "#numbers") != own, "without a price the listed one counts"
    assert "runpod.io/pricing" in text(opened, "#price-note")


def test_what_does_not_fit_is_refused_with_a_way_out(opened: Page) -> None:
    go(opened, "cluster=1xh100-80gb&micro_batch=32&budget=10GiB")
    assert text(opened, "#verdict h2") == "Nothing fits with these settings"
    asked = f"shardwise plan {MODEL} --cluster 1xh100-80gb --micro-batch 32 --budget 10GiB"
    assert text(opened, "#lora-command") == f"{asked} --lora 16 --quantize nf4"
    assert opened.evaluate("document.getElementById('download').disabled")
    opened.evaluate("document.querySelector('#ways button').click(); plannerPage.settled")
    assert text(opened, "#verdict h2").startswith("Use ")
    assert not opened.evaluate("document.getElementById('download').disabled")
    assert text(opened, "#others-text") == "Also: accumulate 2"
    opened.evaluate("document.getElementById('others-reset').click(); plannerPage.settled")
    assert opened.evaluate("document.getElementById('others').hidden")


def test_states_in_host_memory_are_a_choice(opened: Page) -> None:
    go(opened, "cluster=1xh100-80gb&micro_batch=8&recompute=full")
    assert "Host memory per node" not in text(opened, "#numbers")
    opened.evaluate(
        "const host = document.getElementById('host'); host.value = 'backward';"
        " host.dispatchEvent(new Event('change')); plannerPage.settled"
    )
    assert "Host memory per node" in text(opened, "#numbers")
    assert "--update backward --offload states" in text(opened, "#command")


def test_saved_answer_is_a_file_that_looks_alike_and_asks_nothing(
    opened: Page, service: PlanService, tmp_path: Path
) -> None:
    go(opened, "cluster=4xh200&chosen=fsdp")
    path = tmp_path / "saved.html"
    path.write_text(service.saved({"cluster": "4xh200", "chosen": "fsdp"}).text)
    parts = ("#title", "#verdict", "#numbers", "#memory-chart", "#step-chart", "#table", "#frontier-table", "#command")
    with page(path) as saved:
        for part in parts:
            assert text(saved, part) == text(opened, part), part
        assert saved.evaluate("document.querySelectorAll('input, select, button:not([disabled])').length") == 0
        saved.look(width=390)
        assert saved.evaluate("document.documentElement.scrollWidth") <= 390
        assert saved.errors == []
        assert saved.requests == []


def test_quick_answer_follows_a_slider_and_old_ones_are_dropped(opened: Page) -> None:
    go(opened, "cluster=8xh100-80gb&recompute=full")
    found: dict[str, Any] = opened.evaluate("""(async () => {
      const slider = document.getElementById("batch");
      for (let index = 1; index <= 12; index++) { slider.value = index; slider.dispatchEvent(new Event("input")); }
      await plannerPage.settled;
      return { batch: plannerPage.shown.plan.candidates[0].micro_batch, quick: plannerPage.shown.is_quick, hash: location.hash };
    })()""")
    assert (found["batch"], found["quick"]) == (64, False)
    assert "micro_batch=64" in found["hash"]


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
            nodes = f"{gpus // 8}x8" if gpus > 8 else gpus
            go(opened, f"cluster={nodes}xa100-80gb&micro_batch={2 * gpus}")
            assert opened.evaluate("document.querySelectorAll('#frontier-chart .tick').length") >= 3
            assert opened.evaluate(OVERLAPPING) == [], (width, gpus)


def test_a_bar_that_is_cut_carries_a_mark(opened: Page) -> None:
    go(opened, "cluster=8xh100-80gb&micro_batch=4")
    assert opened.evaluate("document.querySelectorAll('.cut').length") == 0
    # Bars end at two and a half times the budget.
    go(opened, "cluster=8xh100-80gb&micro_batch=64&budget=1GiB")
    assert opened.evaluate("document.querySelectorAll('.cut').length") > 0
    assert "the bar goes on to" in str(opened.evaluate("document.querySelector('.cut').textContent"))
