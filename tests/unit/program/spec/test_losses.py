"""A trace with the lean loss, rewritten for the usual one, is what tracing the usual one gives."""

from dataclasses import replace

import pytest
from whole import in_turn

from shardwise.base.errors import InvalidModel
from shardwise.models.reference import Model
from shardwise.models.tasks import cross_entropy, load_task
from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.plan import Plan
from shardwise.planner.memory.peak import estimate
from shardwise.program.spec import ROOT
from shardwise.program.spec.losses import LOSSES, USUAL, with_loss
from shardwise.program.spec.step import StepTrace, Stream

MODELS = ("gpt-tiny", "llama-tiny")


@pytest.mark.parametrize(
    ("computes_in", "model"), in_turn(["bf16", "fp32", "autocast"], "gpt-tiny", "llama-tiny", every=MODELS)
)
def test_the_usual_loss_is_as_traced(model: str, computes_in: str) -> None:
    task = load_task(model, device="meta")
    how = {"make_batch": task.make_batch, "name": model, "ways": (Way(computes_in=computes_in),)}
    lean = trace_model(task.model, loss=task.loss, **how)  # type: ignore[arg-type]
    usual = trace_model(task.model, loss=cross_entropy, **how)  # type: ignore[arg-type]
    assert _as_told(with_loss(lean, loss=USUAL, is_lean=True).traces[0]) == _as_told(usual.traces[0])


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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_losses_differ_by_copies_of_the_logits(precision: str) -> None:
    plan = Plan(strategy="fsdp", precision=precision, micro_batch=16, recompute="full")
    peaks = {
        loss: estimate(Model("gpt2-124m", loss=loss).spec_for(plan), plan=plan, num_ranks=8, batch=16, quick=True)
        for loss in LOSSES
    }
    found = {loss: peak.allocated_bytes for loss, peak in peaks.items()}
    logits = 16 * 1024 * 50304
    assert found["kept"] - found["usual"] == 4 * logits
    assert found["fused"] < found["lean"] < found["chunked"] < found["usual"]
    # Both have as many tensors of a chunk in fp32, of eight chunks or of four; the lean one also copies the targets.
    size, tensors = (2, 3) if precision == "bf16" else (4, 2)
    more, targets = size * logits + tensors * 4 * logits // 8 - tensors * 4 * logits // 4, 16 * 1024 * 8
    assert abs(found["chunked"] - found["lean"] - more) < 2 * targets


def test_another_loss_of_a_model_without_logits_is_one_line() -> None:
    spec = Model("gpt2-124m").spec_for(Plan(strategy="ddp", precision="bf16"))
    (trace,) = spec.traces
    rows = tuple(replace(row, stream=Stream()) for row in trace.rows)
    with pytest.raises(InvalidModel, match="--loss kept: .* does not end in a cross-entropy"):
        with_loss(replace(spec, traces=(replace(trace, rows=rows),)), loss="kept", is_lean=False)
