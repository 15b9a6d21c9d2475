"""A recorded tape, frame by frame: its operations, what the ranks hold after each, where it is in the step.

A tape is checked before anything is drawn: no picture is better than a wrong one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from shardwise.bench.case_result import CaseResult, Happening
from shardwise.errors import ShardwiseError
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program import Kind, Operation, crossing_buckets
from shardwise.program.operations import COMPUTES, ON_BUCKETS, WAITS
from shardwise.report.snapshots import Holding, RankState

# What must be held of a unit's parameters before an operation of this kind.
_NEEDED = {
    Kind.FORWARD: Holding.WHOLE,
    Kind.BACKWARD: Holding.WHOLE,
    Kind.WAIT_GATHER: Holding.ON_ITS_WAY,
}


class WrongTape(ShardwiseError):  # noqa: N818
    """A tape that is not a whole, correct step, so that no picture is made of it."""


def operations_of(case: CaseResult) -> list[Operation]:
    """The tape as the program would write it."""
    return [_operation(happening, case=case) for happening in case.tape]


def _operation(happening: Happening, *, case: CaseResult) -> Operation:
    """As the program writes it; what names something that is not there is refused."""
    try:
        kind = Kind(happening.kind)
    except ValueError:
        raise WrongTape(f"the tape has an operation {happening.kind!r} that this Shardwise does not know") from None
    subject = happening.subject
    units = {unit.name for unit in case.units}
    known: Iterable[str] = case.buckets if kind in ON_BUCKETS else units
    if subject not in known or not units.issuperset(case.buckets.get(subject, ())):
        raise WrongTape(f"the tape has {kind.value} {subject!r}, which is none of the {len(units)} units")
    if not case.ledgers or not 0 <= happening.row < len(case.ledgers[0].entries):
        raise WrongTape(f"{kind.value} {subject} is in row {happening.row}, which the ledger does not have")
    return Operation(kind=kind, subject=subject, num_bytes=happening.num_bytes)


def states_of(
    operations: Sequence[Operation], *, case: CaseResult, placements: Mapping[str, Placement], num_slices: int
) -> list[list[Holding]]:
    """What is held before the first operation and after each: params of all units, then grads, then optim."""
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
        units = rank.buckets[name]
        crosses = rank.crossing.issuperset(units)
        if any(rank.grads[unit] is not Holding.ON_ITS_WAY for unit in units) or crosses is not (
            kind is Kind.WAIT_SLICE
        ):
            raise WrongTape(f"the tape has {operation}, which nobody reduces")
    elif kind in _NEEDED and rank.units[name].num_params and rank.params[name] is not _NEEDED[kind]:
        raise WrongTape(f"the tape has {operation}, of which the ranks hold: {rank.params[name].value}")
    elif kind is Kind.FREE and rank.placements[name].params is not SHARDED:
        raise WrongTape(f"the tape has {operation}, which every rank holds whole all the time")


def _check_end(operations: Sequence[Operation], rank: RankState) -> None:
    """A whole step: it has updated, has all its gradients, and has left nothing gathered."""
    if not any(operation.kind is Kind.UPDATE for operation in operations):
        raise WrongTape(f"the tape of {len(operations)} operations ends before the update")
    for name, unit in rank.units.items():
        left = rank.params[name] if unit.num_params else Holding.SLICE
        # Replicated parameters that were updated in slices may still be on their way to the next step.
        is_home = left is Holding.SLICE if rank.placements[name].params is SHARDED else left is not Holding.DIFFERS
        if not is_home or rank.grads[name] in (Holding.ON_ITS_WAY, Holding.DIFFERS):
            held = f"params {left.value}, grads {rank.grads[name].value}"
            raise WrongTape(f"the tape of {len(operations)} operations ends in the middle of {name} ({held})")


def places_of(operations: Sequence[Operation]) -> list[float]:
    """Where the beginning and each operation are in the step, from 0 to 1.

    A computation is a landmark, since all strategies have the same ones in the same order; what comes between two of
    them shares the room there. So two strategies at one place are at the same computation.
    """
    ends = [number for number, operation in enumerate(operations, start=1) if operation.kind in COMPUTES]
    places = [0.0]
    for mark, (start, end) in enumerate(pairwise([0, *ends, len(operations)])):
        places += [(mark + at / (end - start)) / (len(ends) + 1) for at in range(1, end - start + 1)]
    return places


def flights_of(operations: Sequence[Operation]) -> list[int | None]:
    """The last gather or reduce that is still in flight; at first, one of the step before, which is the same."""
    on_wire: dict[tuple[Kind, str], int] = {}
    flights: list[int | None] = []
    for _ in ("the step before", "this one"):
        flights = [next(reversed(on_wire.values()), None)]
        for index, operation in enumerate(operations):
            if operation.kind in WAITS:
                on_wire.pop((WAITS[operation.kind], operation.subject), None)
            elif operation.kind in WAITS.values():
                on_wire[operation.kind, operation.subject] = index
            flights.append(next(reversed(on_wire.values()), None))
    return flights
