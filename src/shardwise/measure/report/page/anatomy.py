"""The anatomy of a step: the data of the picture in the page, the recorded tape of each strategy, frame by frame.

What the ranks hold comes from replaying the tape (frames.py), bytes from the measured ledgers (CaseResult), and
the rounds of the ring from measure/report/text/ring_rounds.py. The scripts (anatomy.js and anatomy_pictures.js) only
draw. A tape that is not a complete step is left out, with a line that says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.vocabulary.categories import CATEGORIES, GRADS
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.modes import is_ours
from shardwise.measure.bench.results import Bench
from shardwise.measure.profile.memory_ledger import LedgerEntry, MemoryLedger
from shardwise.measure.report.page.captions import beginning, caption
from shardwise.measure.report.page.frames import flights_of, operations_of, places_of, states_of
from shardwise.measure.report.page.html_document import asset
from shardwise.measure.report.snapshots import STATES, Holding, bucket_label
from shardwise.measure.report.text.ring_rounds import Round, first_cells, rounds
from shardwise.measure.report.text.step_picture import OTHER_NAMES, in_words
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement, placement_of
from shardwise.program import Kind

MAX_RANKS = 8
"""With more ranks, the first 7 and the last are drawn, and a ring of 8 stands for theirs."""

SCRIPT = "\n".join(map(asset, ("anatomy_pictures.js", "anatomy.js")))
STYLE = asset("anatomy.css")

# The numbers that stand for them in frames.
_HELD: Mapping[Holding, int] = {held: number for number, held in enumerate(Holding)}
_KINDS: Mapping[Kind, int] = {kind: number for number, kind in enumerate(Kind)}


def anatomy_data(bench: Bench) -> dict[str, Any] | None:
    """Return all data of the script for JSON; None if nothing was recorded.

    kinds, held, states, categories   the words for the numbers in `cases`
    ranks       the ranks that are drawn, of `num_ranks`
    cases       one per strategy (`_case`); left_out: [strategy, why there is no picture]
    rings       number of ranks → the rounds of a ring (`_ring`)
    """
    recorded = [case for case in bench.cases if is_ours(case.engine) and case.tape]
    if not recorded:
        return None
    # By default all ranks are on the shard axis.
    mesh = Mesh(**(bench.settings.get("plan.mesh") or {"shard": bench.num_ranks}))
    mesh.check_ranks(bench.num_ranks)
    overrides = bench.settings.get("plan.overrides") or {}
    cases, left_out = [], []
    for case in recorded:
        try:
            plan = Plan.from_dict({"strategy": case.strategy, "overrides": overrides})
            placements = plan.placements(unit.name for unit in case.units)
            cases.append(_case(case, placements=placements, mesh=mesh))
        except ShardwiseError as error:
            left_out.append([case.strategy, str(error)])
    return {
        "kinds": [kind.value for kind in _KINDS],
        "held": [held.value for held in _HELD],
        "states": list(STATES),
        "categories": list(CATEGORIES),
        "num_ranks": bench.num_ranks,
        "num_slices": mesh.shard,
        "ranks": list(_drawn(bench.num_ranks)),
        "cases": cases,
        "left_out": left_out,
        "rings": {
            str(length): _ring(min(length, MAX_RANKS)) for length in {mesh.shard, mesh.replicate, mesh.num_ranks}
        },
    }


def _drawn(num_ranks: int) -> Sequence[int]:
    if num_ranks <= MAX_RANKS:
        return range(num_ranks)
    return [*range(MAX_RANKS - 1), num_ranks - 1]


def _case(case: CaseResult, *, placements: Mapping[str, Placement], mesh: Mesh) -> dict[str, Any]:
    """Return the data of one strategy.

    about       what is sharded, and other names of the strategy
    units       [name, "RRS": where params, grads and optim live (R replicated, S sharded)]
    subjects    [label, indices of its units] of what operations act on: units, then buckets
    captions    sentences (captions.py), the first one for the beginning
    start       what is held before the first operation, one number each: params of all units, grads, optim
    frames      [kind, subject, bytes, caption, microseconds since the step began, changes], where changes are
                [index into `start`, what is held now, …] of what the operation changed
    places      the place of the beginning and of each frame in the step, from 0 to 1 (`places_of`)
    flights     before the first operation and after each: the operation whose collective is in flight (`flights_of`)
    memory      of each drawn rank, at the beginning and frame by frame (`_memory`)
    is_after    whether `memory` was live after each operation; else it is the most in the operation's row
    peaks       of each drawn rank; None if not measured
    curve       [rank, bytes at the beginning and by frame] of the rank with the highest peak: the most around each
                operation (`_highest`); None if not measured
    """
    operations = operations_of(case)
    states = states_of(operations, case=case, placements=placements, num_slices=mesh.shard)
    names = [unit.name for unit in case.units]
    trained = {unit.name for unit in case.units if unit.num_trained}
    subjects = {name: (name,) for name in names} | dict(case.buckets)
    numbers = {name: number for number, name in enumerate(subjects)}
    drawn, peak_rank = _drawn(mesh.num_ranks), case.peak_rank
    ledgers = {rank: case.measured_ledger(rank) for rank in {*drawn, peak_rank}}
    is_after = all(ledger is None or len(ledger.operations) == len(operations) for ledger in ledgers.values())
    captions = {beginning(keeps_grads=bool(case.ledgers[0].at_rest.num_bytes.get(GRADS, 0))): 0}
    frames = []
    tape = case.scaled_tape
    for operation, happening, before, after in zip(operations, tape, states[:-1], states[1:], strict=True):
        members = subjects[operation.subject]
        is_trained = not trained.isdisjoint(members)
        text = caption(operation.kind, placement=placements[members[0]], trained=is_trained, mesh=mesh)
        frames.append(
            [
                _KINDS[operation.kind],
                numbers[operation.subject],
                operation.num_bytes,
                captions.setdefault(text, len(captions)),
                round(happening.seconds * 1e6),
                _changes(before, after),
            ]
        )
    placement, peak_ledger = placement_of(case.strategy), ledgers[peak_rank]
    curve = None
    if peak_ledger is not None and _labels(peak_ledger) == _labels(case.ledgers[0]):
        curve = [peak_rank, [entry.total_bytes for entry in _highest(peak_ledger, case=case)]]
    return {
        "name": case.strategy,
        "about": f"{next(in_words(placement))}; also known as {OTHER_NAMES[placement]}",
        "units": [
            [name, "".join("S" if getattr(placements[name], state).is_sharded else "R" for state in STATES)]
            for name in names
        ],
        "subjects": [
            [bucket_label(name, units), [names.index(unit) for unit in units]] for name, units in subjects.items()
        ],
        "captions": list(captions),
        "start": [_HELD[held] for held in states[0]],
        "frames": frames,
        "places": places_of(operations),
        "flights": flights_of(operations),
        "memory": [_memory(ledgers[rank], case=case, is_after=is_after) for rank in drawn],
        "is_after": is_after,
        "peaks": [None if (ledger := ledgers[rank]) is None else ledger.peak.total_bytes for rank in drawn],
        "curve": curve,
    }


def _changes(before: Sequence[Holding], after: Sequence[Holding]) -> list[int]:
    pairs = zip(before, after, strict=True)
    return [number for index, (old, new) in enumerate(pairs) if old is not new for number in (index, _HELD[new])]


def _memory(ledger: MemoryLedger | None, *, case: CaseResult, is_after: bool) -> list[list[int]] | None:
    """Return bytes by category at the beginning, then frame by frame, each as the difference from the previous frame.

    None if the rank has no ledger, or one whose rows are not those of rank 0, which recorded the tape.
    """
    if ledger is None or _labels(ledger) != _labels(case.ledgers[0]):
        return None
    found = [ledger.at_rest, *ledger.operations] if is_after else _highest(ledger, case=case)
    rows = [[entry.num_bytes.get(name, 0) for name in CATEGORIES] for entry in found]
    before = [[0] * len(CATEGORIES), *rows]
    return [[new - old for old, new in zip(*pair, strict=True)] for pair in zip(before, rows, strict=False)]


def _highest(ledger: MemoryLedger, *, case: CaseResult) -> list[LedgerEntry]:
    """Return the highest entry at rest and around each operation, including the following rows that issue nothing."""
    starts = [0, *(one.row + 1 for one in case.tape)]
    rows = [ledger.at_rest, *ledger.entries]
    ends = [max(start + 1, after) for start, after in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return [max(rows[start:end], key=lambda entry: entry.total_bytes) for start, end in zip(starts, ends, strict=True)]


def _labels(ledger: MemoryLedger) -> list[str]:
    return [entry.at for entry in ledger.entries]


def _ring(num_ranks: int) -> dict[str, Any]:
    """Return collective → [the cells before anything is sent, the rounds].

    A round is [part, the chunk that each rank sends, the cells after it]; `cells[rank][chunk]` is the sum of the ranks
    whose bits are set. A gather starts where a reduce-scatter ends, but without its partial sums.
    """
    played = list(rounds(num_ranks))
    first = first_cells(num_ranks)
    scatters, gathers = played[: num_ranks - 1], played[num_ranks - 1 :]
    scattered = scatters[-1].cells if scatters else first
    return {
        "num_ranks": num_ranks,
        "reduce-scatter": _ring_data(first, scatters),
        "all-gather": _ring_data(_complete(scattered), [replace(one, cells=_complete(one.cells)) for one in gathers]),
        "all-reduce": _ring_data(first, played),
    }


Cells = tuple[tuple[tuple[int, ...], ...], ...]


def _ring_data(first: Cells, played: Iterable[Round]) -> list[Any]:
    return [_bits(first), [[one.part, list(one.sent), _bits(one.cells)] for one in played]]


def _complete(cells: Cells) -> Cells:
    """Drop the partial sums."""
    return tuple(tuple(summands if len(summands) == len(cells) else () for summands in row) for row in cells)


def _bits(cells: Cells) -> list[list[int]]:
    return [[sum(1 << rank for rank in summands) for summands in row] for row in cells]
