"""Models of other families take the memory that is predicted: encoder-decoder, experts, vision, diffusion, audio, scan."""

import pytest
from architectures import ARCHITECTURES, BATCH
from ranks import run_ranks
from step_memory import alike_ranks, step_bytes
from whole import whole

from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.plan import Plan
from shardwise.planner import estimate

PLANS = [Plan(strategy=strategy) for strategy in ("ddp", "fsdp")]


def measured(rank: int, name: str) -> list[int]:
    """The peak of a step under each plan."""
    with alike_ranks():
        return [step_bytes(ARCHITECTURES[name], plan=plan, batch=BATCH)[0] for plan in PLANS]


@pytest.mark.parametrize("name", whole(*ARCHITECTURES))
def test_the_peak_is_predicted_to_a_fiftieth(name: str) -> None:
    if name not in ("dit", "unet"):
        pytest.importorskip("transformers")
    task = ARCHITECTURES[name]()
    way = Way(computes_in="fp32", device="cpu")
    spec = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name=name, ways=[way])
    for plan, peak in zip(PLANS, run_ranks(measured, num_ranks=2, args=(name,))[0], strict=True):
        found = estimate(spec, plan=plan, num_ranks=2, batch=BATCH, optimizer="adamw-loop", device="cpu")
        assert found.allocated_bytes == pytest.approx(peak, rel=0.02), (name, plan.strategy, found.peak_at)
