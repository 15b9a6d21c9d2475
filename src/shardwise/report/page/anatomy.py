"""The anatomy of a step: the recorded tape of each strategy, frame by frame, for the picture in the page.

What the ranks hold comes from replaying the tape (frames.py), bytes come from the measured ledgers
(bench/case_peak.py), and the rounds of the ring from report/text/ring_rounds.py. The scripts (anatomy.js and
anatomy_pictures.js) only draw. A tape that is not a step is left out, with a line that says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from shardwise.bench.case_peak import measured_ledger
from shardwise.bench.case_result import CaseResult
from shardwise.bench.modes import is_ours
from shardwise.bench.results import Bench
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SHARDED, Placement, placement_of
from shardwise.profile.memory_ledger import LedgerEntry, MemoryLedger
from shardwise.program import Kind, Operation
from shardwise.report.page.captions import beginning, caption
from shardwise.report.page.frames import flights_of, operations_of, places_of, states_of
from shardwise.report.snapshots import STATES, Holding, bucket_label
from shardwise.report.tape_spans import scaled_tape
from shardwise.report.text.ring_rounds import Round, first_cells, rounds
from shardwise.report.text.step_picture import OTHER_NAMES, in_words
from shardwise.vocabulary.categories import CATEGORIES, GRADS

MAX_RANKS = 8
"""With more ranks, the first 7 and the last are drawn, and a ring of 8 stands for theirs."""

SCRIPT = "\n".join(
    files("shardwise.report.page").joinpath(name).read_text(encoding="utf-8")
    for name in ("anatomy_pictures.js", "anatomy.js")
)
STYLE = files("shardwise.report.page").joinpath("anatomy.css").read_text(encoding="utf-8")

# The numbers by which frames name them.
_HELD: Mapping[Holding, int] = {held: number for number, held in enumerate(Holding)}
_KINDS: Mapping[Kind, int] = {kind: number for number, kind in enumerate(Kind)}


def anatomy_data(bench: Bench) -> dict[str, Any] | None:
    """All that the script draws, in JSON's own types; None where nothing was recorded.

    kinds, held, states, categories   the words for the numbers in `cases`
    ranks       those that are drawn, of `num_ranks`
    cases       one per strategy (`_case`); left_out: [strategy, why there is no picture]
    rings       number of ranks → what is passed there (`_ring`)
    """
    recorded = [case for case in bench.cases if is_ours(case.engine) and case.tape]
    if not recorded:
        return None
    mesh = _mesh(bench)
    cases, left_out = [], []
    for case in recorded:
        try:
            cases.append(_case(case, placements=_placements(case, bench=bench), mesh=mesh))
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


def anatomy_markup() -> str:
    """The section, empty: the script fills it in."""
    return files("shardwise.report.page").joinpath("anatomy.html").read_text(encoding="utf-8")


def _drawn(num_ranks: int) -> Sequence[int]:
    if num_ranks <= MAX_RANKS:
        return range(num_ranks)
    return [*range(MAX_RANKS - 1), num_ranks - 1]


def _mesh(bench: Bench) -> Mesh:
    """Of the plan that all cases share; without one all ranks are on the shard axis."""
    found = bench.settings.get("plan.mesh")
    mesh = Mesh(**found) if found else Mesh(shard=bench.num_ranks)
    mesh.check_ranks(bench.num_ranks)
    return mesh


def _placements(case: CaseResult, *, bench: Bench) -> dict[str, Placement]:
    overrides = bench.settings.get("plan.overrides") or {}
    plan = Plan.from_dict({"strategy": case.strategy, "overrides": overrides})
    return plan.placements(unit.name for unit in case.units)


def _case(case: CaseResult, *, placements: Mapping[str, Placement], mesh: Mesh) -> dict[str, Any]:
    """One strategy.

    about       what is sharded, and what else the strategy is called
    units       [name, "RRS": where params, grads and optim live (R whole on every rank, S in slices)]
    subjects    [label, indices of its units] of what operations are done to: units, then buckets
    captions    sentences (captions.py), the first one for the beginning
    start       what is held before the first operation, a number each: params of all units, grads, optim
    frames      [kind, subject, bytes, caption, microseconds since the step began, changes], where changes are
                [index into `start`, what is held now, …] of what the operation changed
    places      where the beginning and each frame are in the step, from 0 to 1 (`places_of`)
    flights     before the first operation and after each: the operation whose collective is under way (`flights_of`)
    memory      of each rank that is drawn, at the beginning and frame by frame (`_memory`)
    is_after    whether that is what was live after each operation; else it is the highest in the operation's row
    peaks       of each rank that is drawn; None where nobody looked
    curve       [rank, bytes at the beginning and by frame] of the rank with the highest peak: the highest around each
                operation (`_highest`); None where nobody looked
    """
    operations = operations_of(case)
    states = states_of(operations, case=case, placements=placements, num_slices=mesh.shard)
    names = [unit.name for unit in case.units]
    subjects = {name: (name,) for name in names} | dict(case.buckets)
    numbers = {name: number for number, name in enumerate(subjects)}
    ledgers = {rank: measured_ledger(case, rank=rank) for rank in {*_drawn(mesh.num_ranks), _peak_rank(case)}}
    is_after = all(ledger is None or len(ledger.operations) == len(operations) for ledger in ledgers.values())
    captions = {beginning(keeps_grads=bool(case.ledgers[0].at_rest.num_bytes.get(GRADS, 0))): 0}
    frames = []
    tape = scaled_tape(case)
    for operation, happening, before, after in zip(operations, tape, states[:-1], states[1:], strict=True):
        text = _caption(operation, members=subjects[operation.subject], case=case, placements=placements, mesh=mesh)
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
    return {
        "name": case.strategy,
        "about": _about(placement_of(case.strategy)),
        "units": [[name, _letters(placements[name])] for name in names],
        "subjects": [[bucket_label(units), [names.index(unit) for unit in units]] for units in subjects.values()],
        "captions": list(captions),
        "start": [_HELD[held] for held in states[0]],
        "frames": frames,
        "places": places_of(operations),
        "flights": flights_of(operations),
        "memory": [_memory(ledgers[rank], case=case, is_after=is_after) for rank in _drawn(mesh.num_ranks)],
        "is_after": is_after,
        "peaks": [_peak(ledgers[rank]) for rank in _drawn(mesh.num_ranks)],
        "curve": _curve(ledgers[_peak_rank(case)], case=case),
    }


def _peak_rank(case: CaseResult) -> int:
    return case.peak_rank if case.allocated_bytes else 0


def _peak(ledger: MemoryLedger | None) -> int | None:
    return None if ledger is None else ledger.peak.total_bytes


def _about(placement: Placement) -> str:
    return f"{next(in_words(placement))}; also known as {OTHER_NAMES[placement]}"


def _caption(
    operation: Operation,
    *,
    members: Sequence[str],
    case: CaseResult,
    placements: Mapping[str, Placement],
    mesh: Mesh,
) -> str:
    trained = any(unit.num_trained for unit in case.units if unit.name in members)
    return caption(operation.kind, placement=placements[members[0]], trained=trained, mesh=mesh)


def _letters(placement: Placement) -> str:
    return "".join("S" if getattr(placement, state) is SHARDED else "R" for state in STATES)


def _changes(before: Sequence[Holding], after: Sequence[Holding]) -> list[int]:
    pairs = zip(before, after, strict=True)
    return [number for index, (old, new) in enumerate(pairs) if old is not new for number in (index, _HELD[new])]


def _memory(ledger: MemoryLedger | None, *, case: CaseResult, is_after: bool) -> list[list[int]] | None:
    """Bytes by category at the beginning, then frame by frame, each as the difference from the one before.

    None where the rank left no ledger, or one of other rows than rank 0, whose tape it is.
    """
    if ledger is None or _labels(ledger) != _labels(case.ledgers[0]):
        return None
    found = [ledger.at_rest, *ledger.operations] if is_after else _highest(ledger, case=case)
    rows = [[entry.num_bytes.get(name, 0) for name in CATEGORIES] for entry in found]
    before = [[0] * len(CATEGORIES), *rows]
    return [[new - old for old, new in zip(*pair, strict=True)] for pair in zip(before, rows, strict=False)]


def _curve(ledger: MemoryLedger | None, *, case: CaseResult) -> list[Any] | None:
    if ledger is None or _labels(ledger) != _labels(case.ledgers[0]):
        return None
    return [_peak_rank(case), [entry.total_bytes for entry in _highest(ledger, case=case)]]


def _highest(ledger: MemoryLedger, *, case: CaseResult) -> list[LedgerEntry]:
    """At rest, then by frame: rows in which nothing was issued belong to the operation before; one may be the peak."""
    starts = [0, *(one.row + 1 for one in case.tape)]
    rows = [ledger.at_rest, *ledger.entries]
    ends = [max(start + 1, after) for start, after in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return [max(rows[start:end], key=lambda entry: entry.total_bytes) for start, end in zip(starts, ends, strict=True)]


def _labels(ledger: MemoryLedger) -> list[str]:
    return [entry.at for entry in ledger.entries]


def _ring(num_ranks: int) -> dict[str, Any]:
    """What is passed on a ring, by collective: the cells before anything is sent, and the rounds.

    A round is [part, the chunk that each rank sends, cells after it]; `cells[rank][chunk]` is the sum of the ranks
    whose bits are set. A gather begins where a reduce-scatter ends, but without the sums that nobody needs then.
    """
    played = list(rounds(num_ranks))
    first = first_cells(num_ranks)
    scatters, gathers = played[: num_ranks - 1], played[num_ranks - 1 :]
    scattered = scatters[-1].cells if scatters else first
    return {
        "num_ranks": num_ranks,
        "reduce-scatter": _played(first, scatters),
        "all-gather": _played(_whole(scattered), [replace(one, cells=_whole(one.cells)) for one in gathers]),
        "all-reduce": _played(first, played),
    }


Cells = tuple[tuple[tuple[int, ...], ...], ...]


def _played(first: Cells, played: Iterable[Round]) -> list[Any]:
    return [_bits(first), [[one.part, list(one.sent), _bits(one.cells)] for one in played]]


def _whole(cells: Cells) -> Cells:
    return tuple(tuple(summands if len(summands) == len(cells) else () for summands in row) for row in cells)


def _bits(cells: Cells) -> list[list[int]]:
    return [[sum(1 << rank for rank in summands) for summands in row] for row in cells]
