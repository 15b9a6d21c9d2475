"""The one peak of a case, and its parts by category: every table and picture of a bench takes them from here. No torch.

The peak is what the device counted in the steps that were timed. The ledger is of one recorded step, and may miss what
was allocated before the recording (workspaces of libraries) and what an allocator adds by rounding up. Both are there
in every row, and count as `other`: so the categories add up to the peak.
"""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.bench.case_result import CaseResult
from shardwise.categories import CATEGORIES, OTHER
from shardwise.profile.memory_ledger import LedgerEntry, MemoryLedger


def measured_ledger(case: CaseResult, *, rank: int) -> MemoryLedger | None:
    """The ledger of a rank, whose peak is the rank's. None where there is none, or where the recorded step held more
    than the steps that were timed: that was not the same step.
    """
    if rank >= len(case.ledgers):
        return None
    ledger = case.ledgers[rank]
    unseen_bytes = case.allocated_bytes[rank] - ledger.peak.total_bytes if rank < len(case.allocated_bytes) else 0
    if unseen_bytes < 0:
        return None
    return MemoryLedger(
        entries=tuple(_with_other(entry, unseen_bytes) for entry in ledger.entries),
        at_rest=_with_other(ledger.at_rest, unseen_bytes),
        operations=tuple(_with_other(entry, unseen_bytes) for entry in ledger.operations),
    )


def peak_ledger(case: CaseResult) -> MemoryLedger | None:
    """Of the rank with the highest peak."""
    return measured_ledger(case, rank=case.peak_rank if case.allocated_bytes else 0)


def peak_parts(case: CaseResult) -> Mapping[str, int] | None:
    """Category → bytes at the peak; their sum is `case.peak_bytes`. None where nobody looked."""
    ledger = peak_ledger(case)
    return None if ledger is None else ledger.peak.num_bytes


def _with_other(entry: LedgerEntry, num_bytes: int) -> LedgerEntry:
    parts = {name: entry.num_bytes.get(name, 0) for name in CATEGORIES}
    return replace(entry, num_bytes={**parts, OTHER: parts[OTHER] + num_bytes})
