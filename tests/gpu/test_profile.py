"""On a GPU the ledger adds up to what torch's own counters say, and the planner's prediction holds."""

import pickle
from pathlib import Path

import pytest
import torch

from shardwise.measure.profile.compare import Profile, predict
from shardwise.measure.profile.rehearsal import Rehearsal, rehearse_apart
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = "gpt2-124m"


def job(strategy: str, *, num_ranks: int = 8, history: str | None = None) -> Rehearsal:
    plan = Plan(strategy=strategy, precision="bf16")
    return Rehearsal(
        model=MODEL, plan=plan, num_ranks=num_ranks, batch=2, seq=256, device="cuda", steps=0, history=history
    )


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledgers_peak_is_torchs_and_was_predicted(strategy: str, num_ranks: int) -> None:
    asked = job(strategy, num_ranks=num_ranks)
    measured = rehearse_apart(asked)
    assert measured.counted_bytes is not None
    assert measured.reserved_bytes is not None
    # The counter has blocks as they were cut, the ledger what was asked for.
    assert measured.ledger.peak.total_bytes <= measured.counted_bytes <= measured.reserved_bytes
    assert measured.counted_bytes < 1.03 * measured.ledger.peak.total_bytes
    predicted = predict(asked, spec_for=Model(MODEL, seq=256).spec_for)
    found = Profile(rehearsal=asked, predicted=predicted, measured=measured)
    assert abs(found.error) < 0.01
    assert [entry.at for entry in measured.ledger.entries] == [entry.at for entry in predicted.entries]
    for name in ("params", "optim"):
        assert measured.ledger.peak.num_bytes[name] == pytest.approx(predicted.memory.breakdown_bytes[name], rel=0.01)


def test_the_history_is_what_torchs_viewer_reads(tmp_path: Path) -> None:
    path = tmp_path / "history.pickle"
    rehearse_apart(job("fsdp", history=str(path)))
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
