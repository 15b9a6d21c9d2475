"""The memory that is reserved in loops whose batches have several lengths."""

import json
from pathlib import Path

import pytest

from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner import estimate

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "unit_graphs_h200.json"


def reserved_bytes(*lengths: int, as_graphs: bool = False, accumulate: int = 1) -> int:
    plan = Plan(strategy="fsdp", precision="bf16", accumulate=accumulate)
    spec = Model("gpt2-124m", seq=1024, lengths=lengths).spec_for(plan)
    return estimate(spec, plan=plan, num_ranks=1, batch=4, as_graphs=as_graphs).reserved_bytes


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_of_one_length_need_what_they_need_without_lengths(accumulate: int) -> None:
    assert reserved_bytes(1024, 1024, accumulate=accumulate) == reserved_bytes(accumulate=accumulate)


def test_lengths_in_turn_need_more_than_the_longest_and_the_order_decides_how_much() -> None:
    longest = reserved_bytes()
    down, up = reserved_bytes(1024, 768, 512, 256), reserved_bytes(256, 512, 768, 1024)
    assert longest < min(down, up) < max(down, up) < 1.5 * longest
    assert down != up


def test_units_as_graphs_need_at_least_what_the_ordinary_steps_before_them_do() -> None:
    lengths = (256, 512, 768, 1024)
    ordinary, graphs = (reserved_bytes(*lengths, as_graphs=as_graphs) for as_graphs in (False, True))
    assert graphs >= ordinary
    # The memory of graphs itself is that of the longest.
    assert graphs == pytest.approx(max(ordinary, reserved_bytes(as_graphs=True)), rel=0.05)


def test_a_measured_loop_of_four_lengths_is_predicted_within_3_percent() -> None:
    rows = {row["case"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    plan = Plan(strategy="fsdp", precision="bf16", capture="off")
    spec = Model("qwen3-0.6b", seq=1024, lengths=(1024, 768, 512, 256)).spec_for(plan)
    predicted = estimate(spec, plan=plan, num_ranks=1, batch=2, made_on_device=True).reserved_bytes
    measured = rows["qwen3-0.6b, 4 lengths"]["reserved_bytes"]["off"]
    assert predicted == pytest.approx(measured, rel=0.03)
