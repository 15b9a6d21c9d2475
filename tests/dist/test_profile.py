"""Rehearsals on a CPU: what was measured is what was predicted, and what is sharded falls as 1/N."""

from functools import cache
from pathlib import Path

import pytest
from whole import strategies

from shardwise.measure.profile.compare import Profile, predict
from shardwise.measure.profile.memory_ledger import LedgerEntry
from shardwise.measure.profile.rehearsal import Rehearsal
from shardwise.measure.profile.rehearsal_process import rehearse
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.program import build

MODEL, SEQ = "gpt-tiny", 16
# What the engine itself allocates; activations are the kernels' business.
KNOWN = ("params", "gathered", "grads", "reduce", "optim")

DEEP = """
from torch import nn
import torch
from shardwise.models.tasks import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = STEM
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def task():
    return Task(model=Deep(), loss=lambda model, x: model(x).square().mean(), make_batch=lambda size: torch.ones(size, 32))
"""


@cache
def source(model: str = MODEL, seq: int | None = SEQ) -> Model:
    return Model(model, seq=seq, kernels="cpu")


def profiled(strategy: str, *, num_ranks: int, engine: str = "shardwise") -> Profile:
    plan = Plan(strategy=strategy, engine=engine)
    job = Rehearsal(model=MODEL, seq=SEQ, plan=plan, num_ranks=num_ranks, batch=2, steps=0)
    return Profile(rehearsal=job, predicted=predict(job, spec_for=source().spec_for), measured=rehearse(job))


def of(entry: LedgerEntry, *names: str) -> dict[str, int]:
    return {name: entry.num_bytes[name] for name in names}


@pytest.mark.parametrize("strategy", strategies("ddp", "zero2", "fsdp"))
def test_a_rank_of_four_has_the_memory_that_was_predicted(strategy: str) -> None:
    found = profiled(strategy, num_ranks=4)
    memory, ledger = found.predicted.memory, found.measured.ledger
    assert abs(found.error) < 0.02
    assert ledger.peak.at == memory.peak_at
    assert of(ledger.peak, *KNOWN) == {name: memory.breakdown_bytes[name] for name in KNOWN}
    assert ledger.at_rest.total_bytes == memory.at_rest_bytes
    # Row by row, by the same names. What a kernel takes for itself while it runs is not predicted, and is `other`.
    assert [entry.at for entry in ledger.entries] == [entry.at for entry in found.predicted.entries]
    for entry, beside in found.rows():
        assert of(entry, "params", "optim") == of(beside, "params", "optim"), entry.at
        without_scratch = entry.total_bytes - entry.num_bytes["other"]
        assert without_scratch <= 1.02 * beside.total_bytes, entry.at


def test_what_is_sharded_falls_as_one_over_the_ranks_and_nothing_else_does() -> None:
    ledgers = {num_ranks: profiled("fsdp", num_ranks=num_ranks).measured.ledger for num_ranks in (1, 2, 4, 8)}

    def most(num_ranks: int, category: str) -> int:
        return max(entry.num_bytes[category] for entry in ledgers[num_ranks].entries)

    for num_ranks in (2, 4, 8):
        # Padding, and the optimizer's counters, one per parameter, do not shrink.
        for category in ("params", "grads", "optim"):
            assert most(num_ranks, category) * num_ranks == pytest.approx(most(1, category), rel=0.002), category
        for category in ("gathered", "reduce"):
            assert most(num_ranks, category) == pytest.approx(most(1, category), rel=0.002), category
    assert most(8, "activations") == most(2, "activations")


def test_what_is_replicated_does_not_fall() -> None:
    peaks = [profiled("ddp", num_ranks=num_ranks).measured.ledger.peak for num_ranks in (2, 8)]
    assert peaks[0].num_bytes == pytest.approx(peaks[1].num_bytes, rel=0.002)


# Without a stem, the root's gradients are there before those of all blocks, and have to wait for their turn.
@pytest.mark.parametrize(("recompute", "stem"), [("full", "nn.Linear(32, 32)"), ("none", "nn.Identity()")])
def test_ones_own_deep_model_is_told_of_unit_by_unit(recompute: str, stem: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.py"
    path.write_text(DEEP.replace("STEM", stem))
    job = Rehearsal(
        model=f"python:{path}:task",
        plan=Plan(strategy="fsdp", recompute=recompute),
        num_ranks=64,
        batch=64,
        steps=2,
    )
    found = Profile(
        rehearsal=job, predicted=predict(job, spec_for=source(job.model, None).spec_for), measured=rehearse(job)
    )
    assert abs(found.error) < 0.02
    labels = [entry.at for entry in found.measured.ledger.entries]
    assert labels == [entry.at for entry in found.predicted.entries]
    # The planner replays some of the twelve; the ledger has them all.
    assert {f"before backward blocks.{index}" for index in range(12)} < set(labels)
    assert len(found.measured.step_seconds) == 2
    assert min(found.measured.step_seconds) > 0


DATACLASS = """
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.models.tasks import Task

@dataclass
class Output:
    hidden: Tensor
    label: str = "x"

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return Output(hidden=x + self.down(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).hidden
        return x

def task():
    return Task(model=Net(), loss=lambda model, x: model(x).square().mean(), make_batch=lambda size: torch.ones(size, 64))
"""


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_units_that_return_dataclasses_are_traced_profiled_and_run_alike(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(DATACLASS)
    job = Rehearsal(model=f"python:{path}:task", plan=Plan(strategy=strategy), num_ranks=4, batch=32, steps=0)
    spec = source(job.model, None).spec_for(job.plan)
    found = Profile(rehearsal=job, predicted=predict(job, spec_for=lambda _: spec), measured=rehearse(job))
    assert abs(found.error) < 0.01
    program = [f"{row.trigger.value} {row.unit}" for row in build(spec, plan=job.plan).rows]
    traced = [entry.at for entry in found.predicted.entries]
    assert [entry.at for entry in found.measured.ledger.entries] == traced
    # The trace begins with what the loss does before the root's forward; the update is no part of it.
    assert sorted(traced) == sorted(program)
    assert sum("before backward blocks" in row for row in traced) == 4


def test_torchs_own_engines_are_measured_too() -> None:
    """One test, since torch 2.11 remembers the process groups of a mesh by name when they are gone."""
    for strategy in ("ddp", "fsdp"):
        found = profiled(strategy, num_ranks=4, engine="torch")
        memory, ledger = found.predicted.memory, found.measured.ledger
        assert abs(found.error) < 0.02
        assert of(ledger.peak, "params", "optim") == {
            name: memory.breakdown_bytes[name] for name in ("params", "optim")
        }
        assert {"gathered", "reduce"} == found.unknown
        assert all(of(entry, "gathered", "reduce") == {"gathered": 0, "reduce": 0} for entry in ledger.entries)
        assert all(beside is not None for _, beside in found.rows())
