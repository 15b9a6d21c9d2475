"""On a GPU the ledger adds up to what torch's own counters say, and the planner's prediction holds."""

import gc
import pickle
from pathlib import Path

import pytest
import torch

from shardwise.measure.profile import Profile, predict
from shardwise.measure.rank import rehearse
from shardwise.measure.rehearsal import Rehearsal
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.sources import Source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = "gpt2-124m"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """A recording has to see the birth of all that is live, also of what matrix products keep for themselves."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0


def job(strategy: str, *, num_ranks: int = 8, history: str | None = None) -> Rehearsal:
    plan = Plan(strategy=strategy, precision="bf16")
    return Rehearsal(
        model=MODEL, plan=plan, num_ranks=num_ranks, batch=2, seq=256, device="cuda", steps=0, history=history
    )


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledgers_peak_is_torchs_and_was_predicted(strategy: str, num_ranks: int) -> None:
    asked = job(strategy, num_ranks=num_ranks)
    measured = rehearse(asked)
    # Counters are reset before the recorded step, and nothing runs after it.
    assert measured.ledger.peak.total_bytes == torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert measured.allocated_bytes == torch.cuda.max_memory_allocated() >= measured.ledger.peak.total_bytes
    assert measured.reserved_bytes >= measured.allocated_bytes
    predicted = predict(asked, spec_for=Source(MODEL, seq=256).spec_for)
    found = Profile(rehearsal=asked, predicted=predicted, measured=measured)
    assert abs(found.error) < 0.03
    assert [entry.at for entry in measured.ledger.entries] == [entry.at for entry in predicted.entries]
    for name in ("params", "optim"):
        # Of what is predicted, blocks are rounded up.
        assert measured.ledger.peak.num_bytes[name] == pytest.approx(predicted.memory.breakdown_bytes[name], rel=0.01)


def test_the_history_is_what_torchs_viewer_reads(tmp_path: Path) -> None:
    path = tmp_path / "history.pickle"
    rehearse(job("fsdp", history=str(path)))
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
