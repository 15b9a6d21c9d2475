"""What the caching allocator reserves for a plan: its steps, storage by storage, through the allocator's model.

The optimizer's state comes into being in the first step, in memory that the first backward has left; so three steps are
run. The first one gathers in another order (program/rules/learning.py), which decides where that state comes to lie.

Of many equal units a moderate number is run, and what each further one adds is taken to be the same.

A model that was made on the device, and not on the meta device or the host, leaves its parameters' memory when it is
prepared; ordinary steps use that. What is captured does not: the allocator gives it back before.

Captured steps have a pool of their own, in which the optimizer's state comes into being too
(engine/captured/step_memory.py); what is there before the first step lies outside, and so does what is kept for graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.job import Job
from shardwise.planner.memory.allocations import AllocationEntry
from shardwise.planner.memory.allocator import SMALL_BYTES, SMALL_SEGMENT_BYTES, CachingAllocator, MemoryBlock
from shardwise.vocabulary.categories import CATEGORIES

HeldBlocks = dict[int, tuple[MemoryBlock | None, int]]
"""Slot → its block (None for what is small) and its size."""

# Runs of equal units are cut to these lengths where they are longer than the second.
_LENGTHS = (28, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What is reserved in the end; and how much larger than asked for the blocks are when most is allocated."""

    reserved_bytes: int
    slack_bytes: int


def reserved_jobs(job: Job) -> list[Job]:
    """The jobs that are run: one with all units, or two cut ones, of which the second is longer."""
    short, longer = (job.cut(length) for length in _LENGTHS)
    return [short, longer] if len(longer.short.spec.units) < len(job.spec.units) else [longer]


def reserve(job: Job, *, batch: int, limit_bytes: int | None = None, made_on_device: bool = False) -> Reserved:
    """Run a job at one batch, on a device that has no more than `limit_bytes` for tensors.

    `made_on_device`: the model was, before it was prepared.
    """
    *shorter, longer = reserved_jobs(job)
    more = len(job.spec.units) - len(longer.short.spec.units)
    if not shorter:
        return _run(longer, batch=batch, limit_bytes=limit_bytes, made_on_device=made_on_device)
    short = shorter[0]
    at_short, at_longer = (_run(one, batch=batch, made_on_device=made_on_device) for one in (short, longer))
    num_units = len(longer.short.spec.units) - len(short.short.spec.units)
    each = (at_longer.reserved_bytes - at_short.reserved_bytes) / num_units
    reserved = round(at_longer.reserved_bytes + more * each)
    if limit_bytes is not None and reserved > limit_bytes:
        # On the shorter model, what the limit leaves when the others have theirs.
        left = limit_bytes - round(more * each)
        limited = _run(longer, batch=batch, limit_bytes=max(left, 0), made_on_device=made_on_device)
        reserved = limited.reserved_bytes + round(more * each)
    return Reserved(reserved_bytes=reserved, slack_bytes=at_longer.slack_bytes)


def _run(job: Job, *, batch: int, limit_bytes: int | None = None, made_on_device: bool = False) -> Reserved:
    run = _Run(batch, limit_bytes=limit_bytes)
    made = {}
    if made_on_device and not job.plan.captures:
        sizes = [param.num_bytes for unit in job.short.spec.units for param in unit.params]
        made = {number: (run.allocate(size), size) for number, size in enumerate(sizes)}
    for size in _first(job, batch=batch):
        run.allocate(size, "first" if job.plan.captures else "")
    run.end(made)
    _first_step(run, job)
    entries = job.ledger.entries
    run.end(run.go(entries, {}))
    for size in [size for states in job.states.values() for size in states.samples]:
        run.allocate(size, "samples")
    run.peak = 0
    run.end(run.go(entries, {}))
    small = -(-run.most_small // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    return Reserved(reserved_bytes=run.allocator.most_reserved_bytes + small, slack_bytes=run.slack_at_peak)


def _first_step(run: "_Run", job: Job) -> None:
    """What stays of it: a workspace for forward's thread, one for backward's at its first product, and the moments."""
    ledger, workspace = job.first_ledger, job.rules.workspace_bytes // 2
    forward, backward, after = ledger.parts()
    run.allocate(workspace)
    held = run.go(forward, {})
    run.allocate(workspace)
    held = run.go(backward, held)
    for size in [*(size for states in job.states.values() for size in states.moments), *job.owned_moments]:
        run.allocate(size)
    run.end(run.go(after, held))


def _first(job: Job, *, batch: int) -> list[int]:
    """What is there before the first step, allocation by allocation."""
    sizes = []
    for states in job.states.values():
        sizes += [*states.held, states.buffers]
    sizes += job.buffers_at_rest()
    sizes.append(job.at_rest[CATEGORIES.index("activations")].at(batch))
    return [size for size in sizes if size]


class _Run:
    """The allocator at work. What is small is only counted: it shares segments and leaves no gaps to speak of."""

    def __init__(self, batch: int, *, limit_bytes: int | None) -> None:
        self.batch = batch
        self.allocator = CachingAllocator(limit_bytes=limit_bytes)
        self.small = self.most_small = 0
        self.peak = self.slack = self.slack_at_peak = 0

    def allocate(self, num_bytes: int, stream: str = "") -> MemoryBlock | None:
        if num_bytes <= SMALL_BYTES:
            self.small += num_bytes
            if self.small > self.most_small:
                self.most_small = self.small
            return None
        block = self.allocator.allocate(num_bytes, stream=stream)
        self.slack += block.size - num_bytes
        if self.allocator.allocated_bytes > self.peak:
            self.peak = self.allocator.allocated_bytes
            self.slack_at_peak = self.slack
        return block

    def go(self, entries: Sequence[AllocationEntry], held: HeldBlocks) -> HeldBlocks:
        """Run entries of a step, from what its earlier ones left; what these leave."""
        batch = self.batch
        for slot, size, stream in entries:
            if size is not None:
                num_bytes = size.at(batch)
                held[slot] = self.allocate(num_bytes, stream), num_bytes
            elif slot in held:
                self._free(*held.pop(slot))
        return held

    def end(self, held: HeldBlocks) -> None:
        """Nothing of a step lasts."""
        for block, num_bytes in held.values():
            self._free(block, num_bytes)

    def _free(self, block: MemoryBlock | None, num_bytes: int) -> None:
        if block is None:
            self.small -= num_bytes
        else:
            self.slack -= block.size - num_bytes
            self.allocator.free(block)
