"""Who is advised to let the segments of torch's allocator expand."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.guards import description
from shardwise.engine.guards.description import advise_on_segments
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program.units import model_spec

SPEC = model_spec(nn.Linear(4, 4))
NAME = "PYTORCH_ALLOC_CONF"


@pytest.fixture(autouse=True)
def _on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAME, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    description._tell_once.cache_clear()


def advice(plan: Plan, *, device: str = "cuda", num_ranks: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advise_on_segments(plan, spec=SPEC, mesh=Mesh(shard=num_ranks), device=torch.device(device))
    return [str(item.message) for item in caught]


@pytest.mark.parametrize(
    "plan", [Plan(capture="off"), Plan(strategy="zero1", capture="off"), Plan(engine="torch")], ids=str
)
def test_a_job_that_shards_is_advised_once(plan: Plan) -> None:
    (line,) = advice(plan)
    assert line.endswith(f"start with {NAME}=expandable_segments:True (shardwise train sets it)")
    assert advice(plan) == []


def test_the_advice_keeps_the_users_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "max_split_size_mb:64")
    (line,) = advice(Plan(capture="off"))
    assert f"{NAME}=max_split_size_mb:64,expandable_segments:True" in line


def test_nothing_is_said_where_it_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Plan(capture="off")
    # Graphs have pools, whose segments do not expand.
    assert advice(Plan()) == advice(Plan(strategy="ddp", capture="off")) == advice(off, num_ranks=1) == []
    assert advice(off, device="cpu") == []
    monkeypatch.setenv(NAME, "expandable_segments:False")
    assert advice(off) == []
    monkeypatch.delenv(NAME)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert advice(off) == []
