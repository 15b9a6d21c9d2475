"""Compares predicted with measured memory: one rehearsal per strategy that fits on this machine. No torch here."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.base.errors import ShardwiseError
from shardwise.base.vocabulary.quantities import GIB, fixed_text
from shardwise.base.vocabulary.segments import segments_expand
from shardwise.measure.profile.memory_ledger import LedgerEntry, paired
from shardwise.measure.profile.rehearsal import Measured, Rehearsal, rehearse_apart
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.planner.memory.peak import MemoryEstimate, estimate_job, job_of
from shardwise.planner.memory.replay import row_peaks
from shardwise.planner.search.candidates import SpecFor
from shardwise.program.spec import ModelSpec

# The planner's names for the optimizer kernels that rehearsal_process.py chooses.
_OPTIMIZERS = {
    "cpu": {"adamw": "adamw-loop", "adam": "adamw-loop", "sgd": "sgd", "muon": "muon-loop"},
    "cuda": {"adamw": "adamw-fused", "adam": "adam-fused", "sgd": "sgd", "muon": "muon-fused"},
}
_UNCUT = 2**62
_MOST_RANKS = 1024
_PROCESS_BYTES = 2**29
"""Host memory of a process without its tensors, mostly torch itself: 0.3 GiB measured, plus a margin."""


class DoesNotFit(ShardwiseError):  # noqa: N818
    """The job needs more memory than is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedMemory:
    """The predicted peak, and the peak of each row of the step."""

    memory: MemoryEstimate
    entries: tuple[LedgerEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of one strategy. `measured` is None if `why_not` says why."""

    rehearsal: Rehearsal
    predicted: PredictedMemory
    measured: Measured | None
    why_not: str = ""

    @property
    def error(self) -> float | None:
        """Predicted minus measured, relative to measured."""
        if self.measured is None:
            return None
        return self.predicted.memory.allocated_bytes / self.measured.allocated_bytes - 1

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(self.measured.step_seconds) if self.measured and self.measured.step_seconds else None

    @property
    def unknown(self) -> frozenset[str]:
        """Categories that the engine does not report; their bytes are measured as activations."""
        return LIMITS[self.rehearsal.plan.engine].untold

    def rows(self) -> Iterator[tuple[LedgerEntry, LedgerEntry | None]]:
        """Return (measured, predicted) for each measured row."""
        measured = self.measured.whole_ledger.entries if self.measured is not None else ()
        return paired(measured, self.predicted.entries)


def predict(rehearsal: Rehearsal, *, spec_for: SpecFor) -> PredictedMemory:
    return predict_memory(
        spec_for(rehearsal.plan),
        plan=rehearsal.plan,
        num_ranks=rehearsal.num_ranks,
        batch=rehearsal.batch,
        optimizer=_OPTIMIZERS[rehearsal.device][rehearsal.optimizer],
        device=rehearsal.device,
        # The rehearsal's process has this one's environment.
        expands=segments_expand(os.environ),
    )


def predict_memory(
    spec: ModelSpec,
    *,
    plan: Plan,
    num_ranks: int,
    batch: int,
    optimizer: str,
    device: str,
    expands: bool = False,
    as_graphs: bool = False,
) -> PredictedMemory:
    """Predict the peak, and the peak of every row; `optimizer` is a name of planner/memory/states.py."""
    whole = job_of(spec, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device=device, as_graphs=as_graphs)
    memory, job = estimate_job(whole, batch=batch, expands=expands), whole.cut(_UNCUT)
    found = row_peaks(job.memory_rows, at_rest=job.at_rest, batch=batch)
    return PredictedMemory(
        memory=memory, entries=tuple(LedgerEntry(at=label, num_bytes=parts) for label, parts in found)
    )


def profile(
    rehearsals: Sequence[Rehearsal],
    *,
    spec_for: SpecFor,
    room_bytes: int,
    run: Callable[[Rehearsal], Measured] = rehearse_apart,
) -> list[Profile]:
    """Predict all rehearsals, and run those that fit into `room_bytes`; if none does, suggest one that would."""
    predictions = [predict(rehearsal, spec_for=spec_for) for rehearsal in rehearsals]
    needs = [
        needed_bytes(found.memory, device=rehearsal.device)
        for found, rehearsal in zip(predictions, rehearsals, strict=True)
    ]
    if min(needs) > room_bytes:
        raise DoesNotFit(_too_much(rehearsals[-1], needs[-1], spec_for=spec_for, room_bytes=room_bytes))
    found = []
    for rehearsal, predicted, needed in zip(rehearsals, predictions, needs, strict=True):
        fits = needed <= room_bytes
        why_not = "" if fits else f"needs {_gib(needed)}, and there are {_gib(room_bytes)}"
        measured = run(rehearsal) if fits else None
        found.append(Profile(rehearsal=rehearsal, predicted=predicted, measured=measured, why_not=why_not))
    return found


def needed_bytes(memory: MemoryEstimate, *, device: str) -> int:
    """Return the memory that the process needs on the device of its tensors."""
    return memory.allocated_bytes + _PROCESS_BYTES if device == "cpu" else memory.device_bytes


def _too_much(rehearsal: Rehearsal, needed: int, *, spec_for: SpecFor, room_bytes: int) -> str:
    text = (
        f"{rehearsal.model} under {rehearsal.plan.strategy} on {rehearsal.num_ranks} ranks needs {_gib(needed)} "
        f"on each; there are {_gib(room_bytes)} here"
    )
    for other, options in _lighter(rehearsal):
        would = needed_bytes(predict(other, spec_for=spec_for).memory, device=other.device)
        if would <= room_bytes:
            return f"{text}: {options} fits ({_gib(would)})"
    return f"{text}, and no number of ranks up to {_MOST_RANKS:,} makes it fit: take a smaller model, --seq or --image"


def _lighter(rehearsal: Rehearsal) -> Iterator[tuple[Rehearsal, str]]:
    """Yield rehearsals that need less memory, with the options that request them."""
    strategies = strategies_of(rehearsal.plan.engine)
    for strategy in strategies:
        yield replace(rehearsal, plan=rehearsal.plan.under(strategy)), f"--strategy {strategy}"
    most_sharded = strategies[-1]
    sharded = replace(rehearsal, plan=rehearsal.plan.under(most_sharded))
    for batch in dict.fromkeys((rehearsal.batch, 1)):
        num_ranks = rehearsal.num_ranks
        options = f"--strategy {most_sharded}" + (f" --micro-batch {batch}" if batch != rehearsal.batch else "")
        yield replace(sharded, batch=batch), options
        while num_ranks < _MOST_RANKS:
            num_ranks = min(2 * num_ranks, _MOST_RANKS)
            yield replace(sharded, num_ranks=num_ranks, batch=batch), f"{options} --ranks {num_ranks}"


def _gib(num_bytes: int) -> str:
    return fixed_text(num_bytes, unit=GIB)
