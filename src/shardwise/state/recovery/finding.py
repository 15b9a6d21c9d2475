"""The newest generation of snapshots that is whole, over all ranks that wrote it and all nodes of this job.

Each node's records are shared out among its ranks, which read them and compare their data with the checksums. A
generation is whole if each rank that wrote it has a good record somewhere, and every element of every piece is in the
data of one of them. A damaged or missing copy does not matter if another holds the same elements.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from shardwise.base.errors import CheckpointError
from shardwise.state.checkpoint.ranks import Ranks
from shardwise.state.recovery.generation import Record, RecordName, check_totals, mapped, read_record
from shardwise.state.recovery.memory_folder import MemoryFolder

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a job: the name of the memory that each rank sees. Ranks of one node share its name."""

    of_ranks: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The nodes, in the order of their first ranks."""
        return list(dict.fromkeys(self.of_ranks))

    def ranks(self, node: str) -> list[int]:
        return [rank for rank, name in enumerate(self.of_ranks) if name == node]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRecord:
    """A good record, and the node that holds it."""

    record: Record
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation that is whole. `held` are its good records, in the order of ranks."""

    step: int
    start: str
    num_ranks: int
    held: tuple[HeldRecord, ...]

    def first_records(self) -> list[Record]:
        """Return one record of each rank that wrote it."""
        by_rank: dict[int, Record] = {}
        for one in self.held:
            by_rank.setdefault(one.record.name.rank, one.record)
        return [by_rank[rank] for rank in range(self.num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The newest whole generation, if any; the newest step of which anything was found (-1: none); and what is lost."""

    generation: Generation | None
    newest_step: int
    notes: tuple[str, ...]


def newest_whole(folder: MemoryFolder, *, ranks: Ranks, nodes: Nodes) -> Search:
    """Find the newest whole generation. Collective; the same on every rank."""
    listed = ranks.each(lambda: [name for text in folder.names() if (name := RecordName.parse(text)) is not None])
    notes: list[str] = []
    generations = sorted({name.generation for names in listed for name in names}, reverse=True)
    newest_step = generations[0][0] if generations else -1
    for wanted in generations:
        mine = _share(listed, wanted, ranks=ranks, nodes=nodes)
        verified = ranks.each(lambda mine=mine: [_verified(folder, name) for name in mine])  # type: ignore[misc]
        held = []
        for rank, outcomes in enumerate(verified):
            notes += [outcome for outcome in outcomes if isinstance(outcome, str)]
            node = nodes.of_ranks[rank]
            held += [HeldRecord(record=outcome, node=node) for outcome in outcomes if isinstance(outcome, Record)]
        held.sort(key=lambda one: (one.record.name.rank, one.record.name.kind != "own"))
        step, start = wanted
        num_ranks = next(name.num_ranks for names in listed for name in names if name.generation == wanted)
        problem = _missing(held, num_ranks=num_ranks)
        if problem is None:
            found = Generation(step=step, start=start, num_ranks=num_ranks, held=tuple(held))
            return Search(generation=found, newest_step=newest_step, notes=tuple(notes))
        notes.append(f"the snapshot of step {step} is not whole in memory: {problem}")
    return Search(generation=None, newest_step=newest_step, notes=tuple(notes))


def _share(
    listed: list[list[RecordName]], generation: tuple[int, str], *, ranks: Ranks, nodes: Nodes
) -> list[RecordName]:
    """Return the records that this rank reads, of those that its node holds. All ranks of a node have one list."""
    near = nodes.ranks(nodes.of_ranks[ranks.index])
    names = sorted(name for name in listed[near[0]] if name.generation == generation)
    return names[near.index(ranks.index) :: len(near)]


def _verified(folder: MemoryFolder, name: RecordName) -> Record | str:
    """Return the record if its data have their checksums, else what is wrong with it."""
    try:
        record = read_record(folder.path, name)
        check_totals(record, memory=mapped(folder.path, record))
    except CheckpointError as error:
        return str(error)
    return record


def _missing(held: list[HeldRecord], *, num_ranks: int) -> str | None:
    """Return what no good record holds; None if the generation is whole."""
    absent = sorted(set(range(num_ranks)) - {one.record.name.rank for one in held})
    if absent:
        return f"what rank {', '.join(map(str, absent))} of {num_ranks} wrote is missing"
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for one in held:
        for piece in one.record.pieces:
            if piece.begin is not None:
                intervals[piece.name].append((piece.start, piece.start + piece.count))
    whole = {name: _merged(parts) for name, parts in intervals.items()}
    for one in held:
        for piece in one.record.pieces:
            if piece.count and not _inside((piece.start, piece.start + piece.count), whole.get(piece.name, [])):
                return f"{piece.name} of rank {one.record.name.rank} is missing"
    return None


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _inside(interval: Interval, merged: list[Interval]) -> bool:
    index = bisect_right(merged, (interval[0], float("inf"))) - 1
    return index >= 0 and interval[1] <= merged[index][1]
