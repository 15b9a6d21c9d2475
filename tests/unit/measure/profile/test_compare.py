"""Predicted against measured: alignment of rows, and what does not fit. Nothing is run here."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from shardwise.base.errors import ShardwiseError
from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.measure.profile.compare import DoesNotFit, Profile, predict, profile
from shardwise.measure.profile.memory_ledger import LedgerEntry, MemoryLedger
from shardwise.measure.profile.rehearsal import Measured, Rehearsal, RehearsalFailed, rehearse_apart
from shardwise.measure.report.text.profile_table import as_data, as_table
from shardwise.models.reference import Model
from shardwise.plan import Plan

# As on a GPU: specs of the catalogue come with the package, so that nothing has to be traced.
JOB = Rehearsal(model="gpt2-124m", plan=Plan(precision="bf16"), num_ranks=8, device="cuda")


@pytest.fixture(scope="module")
def source() -> Model:
    return Model("gpt2-124m")


def entry(label: str, num_bytes: int) -> LedgerEntry:
    return LedgerEntry(at=label, num_bytes={**dict.fromkeys(CATEGORIES, 0), "activations": num_bytes})


def measured(entries: Sequence[LedgerEntry]) -> Measured:
    ledger = MemoryLedger(entries=tuple(entries), at_rest=entry("at rest", 1))
    return Measured(
        ledger=ledger, counted_bytes=None, reserved_bytes=None, step_seconds=(3.0, 1.0, 2.0), device_name="a device"
    )


def test_the_rows_of_a_step_are_those_of_every_unit_and_the_highest_is_the_peak(source: Model) -> None:
    found = predict(JOB, spec_for=source.spec_for)
    # 12 blocks and the root, of which the planner itself replays a few; and the update.
    assert len(found.entries) == 13 * 4 + 2
    highest = max(found.entries, key=lambda one: one.total_bytes)
    assert highest.at == found.memory.peak_at
    # The allocator's blocks are larger than what is asked for, by some MiB in all.
    assert 0 <= found.memory.allocated_bytes - highest.total_bytes < 12 * 2**20


def test_rows_that_were_not_seen_count_with_the_row_before(source: Model) -> None:
    predicted = predict(JOB, spec_for=source.spec_for)
    seen = [one for one in predicted.entries if not one.at.startswith("grads ready")]
    found = Profile(rehearsal=JOB, predicted=predicted, measured=measured(seen))
    rows = list(found.rows())
    assert [one.at for one, _ in rows] == [one.at for one in seen]
    assert all(beside is not None and beside.total_bytes >= one.total_bytes for one, beside in rows)
    complete = Profile(rehearsal=JOB, predicted=predicted, measured=measured(predicted.entries))
    assert all(one is beside for one, beside in complete.rows())
    assert complete.step_seconds == 2.0


@pytest.mark.parametrize("counted", [None, 5_000_000])
def test_categories_add_up_to_the_peak_in_the_table_and_in_json(source: Model, counted: int | None) -> None:
    """Measured and predicted; also where a GPU counted more than the recording saw."""
    predicted = predict(JOB, spec_for=source.spec_for)
    seen = measured(predicted.entries)
    if counted is not None:
        seen = replace(seen, counted_bytes=seen.ledger.peak.total_bytes + counted)
    found = Profile(rehearsal=JOB, predicted=predicted, measured=seen)
    (row,) = as_data([found])["rows"]
    for what in ("measured_bytes", "predicted_bytes"):
        assert sum(row[what]["breakdown"].values()) == row[what]["allocated"]
    totals = {moment["at"]: sum(moment["bytes"].values()) for moment in row["timeline"]}
    assert max(totals.values()) == seen.allocated_bytes == totals[row["measured_bytes"]["at"]]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(as_table([found]))
    for line in capture.get().splitlines()[1:]:
        peak, *parts = (float(word) for word in line.split()[1:9])
        # Each number is rounded, to a tenth or to less.
        assert sum(parts) == pytest.approx(peak, abs=0.05 * 8)


def test_what_does_not_fit_is_not_run_and_the_rest_is(source: Model) -> None:
    strategies = ("ddp", "fsdp")
    jobs = [Rehearsal(model=JOB.model, plan=Plan(strategy=name), num_ranks=64, device="cuda") for name in strategies]
    needs = [predict(job, spec_for=source.spec_for).memory.device_bytes for job in jobs]
    ran: list[str] = []

    def run(job: Rehearsal) -> Measured:
        ran.append(job.plan.strategy)
        return measured([entry("before forward (root)", 100)])

    found = profile(jobs, spec_for=source.spec_for, room_bytes=(needs[0] + needs[1]) // 2, run=run)
    assert ran == ["fsdp"]
    assert found[0].measured is None
    assert "needs" in found[0].why_not
    assert found[0].error is None
    assert found[1].error is not None


def test_a_model_that_does_not_fit_names_what_would(source: Model) -> None:
    job = Rehearsal(model=JOB.model, plan=Plan(strategy="ddp"), num_ranks=2, batch=1, device="cuda")
    needed = predict(job, spec_for=source.spec_for).memory.device_bytes
    with pytest.raises(DoesNotFit, match=r"under ddp on 2 ranks needs .* GiB on each; .*: --strategy \w+.* fits \("):
        profile([job], spec_for=source.spec_for, room_bytes=needed - 10**6)
    with pytest.raises(DoesNotFit, match=r"--strategy fsdp --ranks \d+ fits"):
        profile([job], spec_for=source.spec_for, room_bytes=needed - 5 * 10**8)
    with pytest.raises(DoesNotFit, match=r"no number of ranks up to 1,024 makes it fit"):
        profile([job], spec_for=source.spec_for, room_bytes=10**6)


def test_a_rehearsal_survives_json() -> None:
    assert Rehearsal.from_data(JOB.to_data()) == JOB


def test_a_rehearsal_that_fails_is_one_line() -> None:
    with pytest.raises(RehearsalFailed) as caught:
        rehearse_apart(Rehearsal(model="python:nowhere.py:task", plan=Plan(strategy="ddp")))
    assert isinstance(caught.value, ShardwiseError)
    assert str(caught.value) == (
        "python:nowhere.py:task under ddp: InvalidModel: python:nowhere.py:task: there is no file nowhere.py"
    )
