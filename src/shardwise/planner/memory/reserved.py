"""The memory that the caching allocator reserves for a plan: its steps run through the allocator's model.

The optimizer's state is allocated in the first step, in memory that the first backward has freed; so three steps are
run, or two if the third would be the same. The first one gathers in another order (program/rules/learning.py), which
decides where that state is placed.

Of many equal units a moderate number is run; each further one is assumed to add the same.

A model that was made on the device, not on the meta device or the host, frees its parameters' memory when it is
prepared; steps reuse that.

Where units are CUDA graphs, what they compute has its own pool, which averaged gradients may use as
well (program/gradient_place.py) unless they are accumulated over several passes; gathered units have one of their own.

Batches of several lengths (ModelSpec.lengths) are run in their order, again and again until a round needs no new
segment. What the allocator has reserved then depends on the order, because a block that one length leaves free serves
part of another. Where units are CUDA graphs, ordinary steps come first, until the graphs are recorded in the memory of
the longest; a longer pass than any before gives back what is unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle, islice
from operator import attrgetter

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.planner.job import Job
from shardwise.planner.memory.allocations import GRADIENTS, SLOTS, UNIT_GRAPHS, AllocationEntry, Ledger
from shardwise.planner.memory.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    MemoryBlock,
    OutOfMemory,
)

HeldBlocks = dict[int, tuple[MemoryBlock | None, int]]
"""Slot → its block (None for small allocations) and its size."""

# Longer runs of equal units are cut to these lengths.
_LENGTHS = (28, 40)
# Rounds of all lengths, at most.
_MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the allocator may use: `limit_bytes` for tensors; the others as for `estimate_job`."""

    limit_bytes: int | None = None
    made_on_device: bool = False
    expands: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The most reserved bytes; and the excess of blocks over their requests at the peak of allocated bytes.

    `is_stopped`: it needs more than the limit, and was not run further.
    """

    reserved_bytes: int
    slack_bytes: int
    is_stopped: bool = False


def reserved_jobs(job: Job) -> list[Job]:
    """Return the jobs that are run: one with all units, or a short and a longer cut one."""
    short, longer = (job.cut(length) for length in _LENGTHS)
    return [short, longer] if len(longer.short.spec.units) < len(job.spec.units) else [longer]


def reserve(job: Job, *, batch: int, room: Room, stops: bool = False) -> Reserved:
    """Run a job at one batch; `stops`: what needs more than the limit is only said to need more."""
    known, key = _known(job), (batch, room)
    if key not in known or (known[key].is_stopped and not stops):
        jobs = [job, replace(job, as_graphs=False, _cuts={})] if job.spec.lengths and job.as_graphs else [job]
        found = (_reserve(one, batch=batch, room=room, stops=stops) for one in jobs)
        known[key] = max(found, key=attrgetter("is_stopped", "reserved_bytes"))
    return known[key]


@lru_cache(maxsize=4096)
def _known(job: Job) -> dict[tuple[int, Room], Reserved]:
    """Return the cache of a job."""
    return {}


def _reserve(job: Job, *, batch: int, room: Room, stops: bool) -> Reserved:
    *shorter, longer = reserved_jobs(job)
    more = len(job.spec.units) - len(longer.short.spec.units)
    in_graphs = job.as_graphs and job.unshortened.ledger.pass_memory(batch).places_gradients
    run = partial(_run, batch=batch, in_graphs=in_graphs, stops=stops)
    if not shorter:
        return run(longer, room=room)
    short, unlimited = shorter[0], replace(room, limit_bytes=None)
    at_short, at_longer = run(short, room=unlimited), run(longer, room=unlimited)
    num_units = len(longer.short.spec.units) - len(short.short.spec.units)
    each = (at_longer.reserved_bytes - at_short.reserved_bytes) / num_units
    reserved, slack = round(at_longer.reserved_bytes + more * each), at_longer.slack_bytes
    if room.limit_bytes is not None and reserved > room.limit_bytes:
        # The limit for the cut model: the units that it lacks need their part.
        left = room.limit_bytes - round(more * each)
        limited = run(longer, room=replace(room, limit_bytes=max(left, 0)))
        return replace(limited, reserved_bytes=limited.reserved_bytes + round(more * each), slack_bytes=slack)
    return Reserved(reserved_bytes=reserved, slack_bytes=slack)


def _run(job: Job, *, batch: int, in_graphs: bool, room: Room, stops: bool) -> Reserved:
    """Run a job; `in_graphs`: averaged gradients lie in the memory of graphs."""
    allocator = CachingAllocator(limit_bytes=room.limit_bytes, expands=room.expands, stops=stops)
    run = _Run(batch, gradients_in=UNIT_GRAPHS if in_graphs else "", allocator=allocator)
    try:
        _steps(run, job, in_graphs=in_graphs, made_on_device=room.made_on_device)
    except OutOfMemory:
        assert room.limit_bytes is not None
        return Reserved(reserved_bytes=room.limit_bytes + 1, slack_bytes=0, is_stopped=True)
    small = -(-run.most_small // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    return Reserved(reserved_bytes=run.allocator.most_reserved_bytes + small, slack_bytes=run.slack_at_peak)


def _steps(run: "_Run", job: Job, *, in_graphs: bool, made_on_device: bool) -> None:
    """Allocate what there is before the first step, and run steps until they repeat."""
    takes_first = job.engine.takes_workspaces_first
    if takes_first:
        run.allocate_workspaces(job)
    made = {}
    if made_on_device:
        sizes = [param.num_bytes for unit in job.short.spec.units for param in unit.params]
        made = {number: (run.allocate(size), size) for number, size in enumerate(sizes)}
    for size in _sizes_before(job, batch=run.batch):
        run.allocate(size)
    run.free_all(made)
    if job.as_graphs:
        # Before graphs are recorded, the state is moved and unused memory given back.
        run.allocate_moments(job)
        num_bytes = job.ledger.pass_memory(run.batch).graph_bytes(with_gradients=in_graphs)
        run.free_all({0: (run.allocate(num_bytes, UNIT_GRAPHS), num_bytes)})
        # Those of the stream on which graphs are recorded.
        run.allocate_workspaces(job, UNIT_GRAPHS)
    else:
        _first_step(run, job, workspace=0 if takes_first else job.rules.workspace_bytes // 2)
    _later_steps(run, job)


def _shares(job: Job) -> tuple[list[float], list[float]]:
    """Return the lengths of the first step's passes and of later ones, by the longest; one where all are equal."""
    lengths = job.spec.lengths
    if not lengths:
        return [1.0], [1.0]
    shares = [length / max(lengths) for length in lengths]
    num_first = job.plan.accumulate
    start = num_first % len(shares)
    return list(islice(cycle(shares), num_first)), [*shares[start:], *shares[:start]]


def _first_step(run: "_Run", job: Job, *, workspace: int) -> None:
    """Run the first step, of which the moments stay, and the workspaces of forward's and backward's threads (the latter
    from its first product on), where these were not taken before. Of passes of one length, one is run.
    """
    passes, _ = _shares(job)
    for number, share in enumerate(passes):
        ledger = job.ledger if number else job.first_ledger
        forward, backward, after = ledger.parts()
        sizes = run.sized(ledger, share=share)
        if not number:
            run.allocate(workspace)
        held = run.replay(forward, {}, sizes=sizes)
        if not number:
            run.allocate(workspace)
        held = run.replay(backward, held, sizes=sizes)
        if number + 1 == len(passes):
            run.allocate_moments(job)
        run.free_all(run.replay(after, held, sizes=sizes))


def _later_steps(run: "_Run", job: Job) -> None:
    """Run rounds of all lengths, until one needs no new segment; of one length at most two.

    A step frees all that it allocates. One that needed no new segment leaves the allocator as it was before, so that
    the next one would be the same. The first one with graphs finds no free memory, and leaves some that fits no later
    request.
    """
    _, shares = _shares(job)
    sizes = {share: run.sized(job.ledger, share=share) for share in set(shares)}
    longest = 0.0
    for _ in range(_MOST_ROUNDS if len(shares) > 1 else 2):
        num_segments, run.peak = run.allocator.num_segments, 0
        for share in shares:
            if longest and share > longest and job.as_graphs:
                run.allocator.give_back(without=(UNIT_GRAPHS, SLOTS))
            longest = max(longest, share)
            run.free_all(run.replay(job.ledger.entries, {}, sizes=sizes[share]))
        if run.allocator.num_segments == num_segments:
            return


def _sizes_before(job: Job, *, batch: int) -> list[int]:
    """Return the sizes of the allocations before the first step."""
    sizes = [size for states in job.states.values() for size in (*states.held, states.buffers)]
    batch_bytes = job.at_rest[CATEGORIES.index("activations")].at(batch)
    return [size for size in (*sizes, *job.buffers_at_rest(), batch_bytes) if size]


class _Run:
    """A run of the allocator. Small allocations are only counted: they share segments and leave few gaps."""

    def __init__(self, batch: int, *, gradients_in: str, allocator: CachingAllocator) -> None:
        self.batch = batch
        self._gradients_in = gradients_in
        self.allocator = allocator
        self.small = self.most_small = 0
        self.requested = self.peak = self.slack_at_peak = 0

    def allocate(self, num_bytes: int, stream: str = "") -> MemoryBlock | None:
        if num_bytes <= SMALL_BYTES:
            self.small += num_bytes
            if self.small > self.most_small:
                self.most_small = self.small
            return None
        block = self.allocator.allocate(num_bytes, stream)
        self.requested += num_bytes
        if self.allocator.allocated_bytes > self.peak:
            self.peak = self.allocator.allocated_bytes
            self.slack_at_peak = self.peak - self.requested
        return block

    def allocate_workspaces(self, job: Job, stream: str = "") -> None:
        """Allocate those of matrix products in forward and in backward."""
        for _ in range(2):
            self.allocate(job.rules.workspace_bytes // 2, stream)

    def allocate_moments(self, job: Job) -> None:
        """Make the optimizer's state."""
        for size in [*(size for states in job.states.values() for size in states.moments), *job.owned_moments]:
            self.allocate(size)

    def sized(self, ledger: Ledger, *, share: float = 1.0) -> list[int]:
        """Return the ledger's sizes at this batch, or at a share of its elements."""
        found = [size.at(self.batch) for size in ledger.sizes]
        if share == 1:
            return found
        return [
            whole - round((1 - share) * (whole - size.at(0))) for size, whole in zip(ledger.sizes, found, strict=True)
        ]

    def replay(self, entries: Sequence[AllocationEntry], held: HeldBlocks, *, sizes: Sequence[int]) -> HeldBlocks:
        """Run entries of a step, starting with the blocks that earlier ones hold; return those held afterwards.

        `allocate` and `_free` are written out, since this is most of a search's time.
        """
        allocator, gradients_in = self.allocator, self._gradients_in
        allocate, free = allocator.allocate, allocator.free
        small, requested = self.small, self.requested
        for slot, number, stream in entries:
            if number < 0:
                if slot in held:
                    block, num_bytes = held.pop(slot)
                    if block is None:
                        small -= num_bytes
                    else:
                        requested -= num_bytes
                        free(block)
                continue
            num_bytes = sizes[number]
            if num_bytes <= SMALL_BYTES:
                small += num_bytes
                if small > self.most_small:
                    self.most_small = small
                held[slot] = None, num_bytes
            else:
                held[slot] = allocate(num_bytes, gradients_in if stream == GRADIENTS else stream), num_bytes
                requested += num_bytes
                if allocator.allocated_bytes > self.peak:
                    self.peak = allocator.allocated_bytes
                    self.slack_at_peak = self.peak - requested
        self.small, self.requested = small, requested
        return held

    def free_all(self, held: HeldBlocks) -> None:
        for block, num_bytes in held.values():
            self._free(block, num_bytes)

    def _free(self, block: MemoryBlock | None, num_bytes: int) -> None:
        if block is None:
            self.small -= num_bytes
        else:
            self.requested -= num_bytes
            self.allocator.free(block)
