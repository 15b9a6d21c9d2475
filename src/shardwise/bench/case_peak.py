"""The memory peak of a case and its parts by category, for all tables and pictures of a bench. No torch here.

The peak is what the device counted in the timed steps; the ledger is of one recorded step. What the ledger did not see
counts as `other` (MemoryLedger.adding_up_to), so that the categories add up to the peak.
"""

from collections.abc import Mapping

from shardwise.bench.case_result import CaseResult
from shardwise.profile.memory_ledger import MemoryLedger
from shardwise.vocabulary.categories import CATEGORIES


def measured_ledger(case: CaseResult, *, rank: int) -> MemoryLedger | None:
    """Return a rank's ledger, raised to the rank's peak; None if it has none, or if the recorded step held more than
    the timed ones, so that it was not the same step.
    """
    if rank >= len(case.ledgers):
        return None
    ledger = case.ledgers[rank]
    peak_bytes = case.allocated_bytes[rank] if rank < len(case.allocated_bytes) else ledger.peak.total_bytes
    return ledger.adding_up_to(peak_bytes) if peak_bytes >= ledger.peak.total_bytes else None


def peak_ledger(case: CaseResult) -> MemoryLedger | None:
    """Return the ledger of the rank with the highest peak."""
    return measured_ledger(case, rank=case.peak_rank if case.allocated_bytes else 0)


def peak_parts(case: CaseResult) -> Mapping[str, int] | None:
    """Return category → bytes at the peak, which add up to `case.peak_bytes`; None if no step was recorded."""
    ledger = peak_ledger(case)
    return None if ledger is None else {name: ledger.peak.num_bytes.get(name, 0) for name in CATEGORIES}
