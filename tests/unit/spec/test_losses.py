"""A trace with the lean loss, rewritten for the usual one, is what tracing the usual one gives."""

import pytest
from whole import in_turn

from shardwise.spec import ROOT
from shardwise.spec.losses import with_usual_loss
from shardwise.spec.step import StepTrace
from shardwise.tasks import cross_entropy, load_task
from shardwise.trace.observe import Way
from shardwise.trace.trace import trace_model

MODELS = ("gpt-tiny", "llama-tiny")


@pytest.mark.parametrize(
    ("computes_in", "model"), in_turn(["bf16", "fp32", "autocast"], "gpt-tiny", "llama-tiny", every=MODELS)
)
def test_the_usual_loss_is_as_traced(model: str, computes_in: str) -> None:
    task = load_task(model, device="meta")
    how = {"make_batch": task.make_batch, "name": model, "ways": (Way(computes_in=computes_in),)}
    lean = trace_model(task.model, loss=task.loss, **how)  # type: ignore[arg-type]
    usual = trace_model(task.model, loss=cross_entropy, **how)  # type: ignore[arg-type]
    assert _as_told(with_usual_loss(lean).traces[0]) == _as_told(usual.traces[0])


def _as_told(trace: StepTrace) -> list[object]:
    """Return the root's rows; ordinals by the order in which they appear, since only that they differ counts."""
    seen: dict[int, int] = {}
    found: list[object] = []
    for row in trace.rows:
        for event in row.stream.events if row.unit == ROOT else ():
            number = event.ordinal if event.ordinal is None else seen.setdefault(event.ordinal, len(seen))
            found.append((row.trigger, event.act, event.what, event.num_bytes, number, event.owner))
        found += [(row.trigger, row.unit, op) for op in row.stream.ops]
    return found
