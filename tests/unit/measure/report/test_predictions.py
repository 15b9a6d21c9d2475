"""`shardwise.predict`, and how plans, predictions and benches show themselves in a notebook."""

import html.parser

import pytest
from measure.report.sample_bench import sample_bench

import shardwise
from shardwise import Plan
from shardwise.measure.report.predictions import Predictions


class Cells(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def found() -> Predictions:
    return shardwise.predict("gpt2-124m", cluster="8xa100-40gb", plan=Plan(precision="bf16", recompute="full"))


def test_predict_costs_every_strategy_and_recommends_a_plan_that_can_be_run(found: Predictions) -> None:
    assert [one.name for one in found.candidates] == list(shardwise.STRATEGIES)
    assert found.recommended is not None
    assert found.recommended in [one.plan for one in found.candidates]
    assert found.why.startswith(f"Recommended: {found.recommended.strategy}, ")


def test_nothing_is_recommended_where_nothing_fits() -> None:
    found = shardwise.predict("llama-3.1-8b", cluster="1xt4")
    assert found.recommended is None
    assert found.why == "nothing fits"


def test_each_shows_itself_as_a_table(found: Predictions) -> None:
    shown = Cells(found._repr_html_())
    assert shown.tags.count("tr") == 1 + len(shardwise.STRATEGIES)
    assert "▶" in shown.texts
    assert found.recommended is not None
    assert "recompute" in Cells(found.recommended._repr_html_()).texts
    assert "activations" in Cells(found.candidates[0]._repr_html_()).texts
    bench = Cells(sample_bench(name="<b>demo</b>")._repr_html_())
    assert "b" not in bench.tags
    assert "ddp" in bench.texts


def test_a_plan_without_settings_still_names_its_strategy() -> None:
    assert Cells(Plan()._repr_html_()).texts == ["Plan", "setting", "value", "strategy", "fsdp"]
