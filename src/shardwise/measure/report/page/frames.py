"""Reads a recorded tape frame by frame: its operations, what the ranks hold after each, and its place in the step.

A tape is checked before anything is drawn, because no picture is better than a wrong one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from shardwise.base.errors import ShardwiseError
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.report.snapshots import Holding, RankState
from shardwise.plan.placement import Placement
from shardwise.program import Kind, Operation, crossing_buckets
from shardwise.program.operations import COMPUTES, ON_BUCKETS, WAITS

# What must be held of a unit's parameters before an operation of this kind.
_NEEDED = {Kind.FORWARD: Holding.WHOLE, Kind.BACKWARD: Holding.WHOLE, Kind.WAIT_GATHER: Holding.ON_ITS_WAY}


class WrongTape(ShardwiseError):  # noqa: N818
    """A tape that is not a complete, correct step, so that it is not drawn."""


def operations_of(case: CaseResult) -> list[Operation]:
    """Return the tape as operations of a step program."""
    return [_operation(happening, case=case) for happening in case.tape]


def _operation(happening: Happening, *, case: CaseResult) -> Operation:
    """Return one operation of the tape; an unknown kind, subject or row is an error."""
    try:
        kind = Kind(happening.kind)
    except ValueError:
        raise WrongTape(f"the tape has an operation {happening.kind!r} that this Shardwise does not know") from None
    subject = happening.subject
    units = {unit.name for unit in case.units}
    known: Iterable[str] = case.buckets if kind in ON_BUCKETS else units
    if kind is Kind.TAKE_GRADS:
        # Of a piece.
        known = {*units, *case.buckets}
    if subject not in known or not units.issuperset(case.buckets.get(subject, ())):
        raise WrongTape(f"the tape has {kind.value} {subject!r}, which is none of the {len(units)} units")
    if not case.ledgers or not 0 <= happening.row < len(case.ledgers[0].entries):
        raise WrongTape(f"{kind.value} {subject} is in row {happening.row}, which the ledger does not have")
    return Operation(kind=kind, subject=subject, num_bytes=happening.num_bytes)


def states_of(
    operations: Sequence[Operation], *, case: CaseResult, placements: Mapping[str, Placement], num_slices: int
) -> list[list[Holding]]:
    """Return what is held before the first operation and after each: params of all units, then grads, then optim."""
    rank = RankState(
        case.units,
        placements=placements,
        buckets=case.buckets,
        crossing_buckets=crossing_buckets(operations),
        num_slices=num_slices,
    )
    # The previous step, which is the same, leaves gathers in flight.
    for operation in operations:
        rank.do(operation)
    rank.begin_step()
    states = [_state(rank)]
    for operation in operations:
        _check(operation, rank)
        rank.do(operation)
        states.append(_state(rank))
    _check_end(operations, rank)
    return states


def _state(rank: RankState) -> list[Holding]:
    return [held for of_units in rank.holds().values() for held in of_units.values()]


def _check(operation: Operation, rank: RankState) -> None:
    kind, name = operation.kind, operation.subject
    if kind in (Kind.WAIT_REDUCE, Kind.REDUCE_SLICE, Kind.WAIT_SLICE):
        crosses = name in rank.crossing
        if name not in rank.reducing or crosses is not (kind is Kind.WAIT_SLICE):
            raise WrongTape(f"the tape has {operation}, which is not being reduced")
    elif kind is Kind.WAIT_GATHER and rank.num_slices == 1:
        # In a group of one rank the gather is complete when it is issued.
        return
    elif kind in _NEEDED and rank.units[name].num_params and rank.params[name] is not _NEEDED[kind]:
        raise WrongTape(f"the tape has {operation}, of which the ranks hold: {rank.params[name].value}")
    elif kind is Kind.FREE and not rank.placements[name].params.is_sharded:
        raise WrongTape(f"the tape has {operation}, which every rank holds whole all the time")


def _check_end(operations: Sequence[Operation], rank: RankState) -> None:
    """Check that the step is complete: it has updated, reduced all gradients, and left nothing gathered."""
    if not any(operation.kind is Kind.UPDATE for operation in operations):
        raise WrongTape(f"the tape of {len(operations)} operations ends before the update")
    for name, unit in rank.units.items():
        left = rank.params[name] if unit.num_params else Holding.SLICE
        # Gathers of replicated parameters that were updated in slices may reach into the next step.
        is_home = left is Holding.SLICE if rank.placements[name].params.is_sharded else left is not Holding.DIFFERS
        if not is_home or rank.grads[name] in (Holding.ON_ITS_WAY, Holding.DIFFERS):
            held = f"params {left.value}, grads {rank.grads[name].value}"
            raise WrongTape(f"the tape of {len(operations)} operations ends in the middle of {name} ({held})")


def places_of(operations: Sequence[Operation]) -> list[float]:
    """Return the place of the beginning and of each operation in the step, from 0 to 1.

    All strategies have the same computations in the same order, so computations have fixed places, and the operations
    between two of them are spread evenly. Two strategies at one place are therefore at the same computation.
    """
    ends = [number for number, operation in enumerate(operations, start=1) if operation.kind in COMPUTES]
    places = [0.0]
    for mark, (start, end) in enumerate(pairwise([0, *ends, len(operations)])):
        places += [(mark + at / (end - start)) / (len(ends) + 1) for at in range(1, end - start + 1)]
    return places


def flights_of(operations: Sequence[Operation]) -> list[int | None]:
    """Return the last collective in flight before the first operation (left from the previous step) and after each."""
    on_wire: dict[tuple[Kind, str], int] = {}
    flights: list[int | None] = []
    for _ in ("the previous step", "this step"):
        flights = [next(reversed(on_wire.values()), None)]
        for index, operation in enumerate(operations):
            if operation.kind in WAITS:
                on_wire.pop((WAITS[operation.kind], operation.subject), None)
            elif operation.kind in WAITS.values():
                on_wire[operation.kind, operation.subject] = index
            flights.append(next(reversed(on_wire.values()), None))
    return flights
