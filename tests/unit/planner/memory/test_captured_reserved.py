"""The memory of units as CUDA graphs: what the planner adds for them; and what was measured of Hugging Face models."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


def estimated(capture: str = "auto", *, num_ranks: int = 1, as_graphs: bool = False) -> MemoryEstimate:
    plan = Plan(strategy="fsdp", precision="bf16", capture=capture)
    spec = Model("gpt2-124m", seq=1024).spec_for(plan)
    return estimate(spec, plan=plan, num_ranks=num_ranks, batch=4, as_graphs=as_graphs)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_graphs_of_units_keep_their_memory_from_gradients(num_ranks: int) -> None:
    ordinary, units = (estimated(num_ranks=num_ranks, as_graphs=as_graphs) for as_graphs in (False, True))
    assert ordinary.reserved_bytes < units.reserved_bytes < 1.2 * ordinary.reserved_bytes
    assert units.allocated_bytes == pytest.approx(ordinary.allocated_bytes, rel=0.02)


def test_unless_graphs_are_asked_for_ordinary_steps_are_predicted() -> None:
    assert estimated() == estimated("off") == estimated("off", as_graphs=True)


def test_what_a_model_made_on_the_device_leaves_is_used_by_steps() -> None:
    plan = Plan(precision="bf16")
    spec = Model("llama-3.2-1b", seq=2048).spec_for(plan)
    elsewhere, here = (
        estimate(spec, plan=plan, num_ranks=1, batch=1, made_on_device=made).reserved_bytes for made in (False, True)
    )
    assert here < 0.97 * elsewhere


@pytest.mark.parametrize(
    "model",
    [
        # gemma3-1b: with its logits of 2 GiB, where the optimizer's state lies decides whether the next step finds room.
        pytest.param(name, marks=pytest.mark.whole)
        for name in ("bert-large", "qwen3-0.6b", "llama-1b", "gemma3-1b")
    ],
)
def test_measured_trainings_are_predicted_within_1_and_3_percent(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from memory_predictions import compare

    measured: list[dict[str, Any]] = json.loads((BENCHMARKS / "results" / "captured_models_h200.json").read_text())[
        "rows"
    ]
    rows = compare(row for row in measured if row["model"] == model)
    assert rows
    for row in rows:
        assert abs(row["errors"]["allocated"]) < 0.01, row
        assert abs(row["errors"]["reserved"]) < 0.03, row
