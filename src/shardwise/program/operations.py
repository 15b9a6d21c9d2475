"""The operations of a step, and the program that lists them: data, not code."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an operation; the value is the verb that pictures and tapes show.

    `take grads` copies a unit's gradients into the buffer that its bucket is reduced in; of a unit that is reduced in
    pieces, those of one piece.

    On a mesh with a second axis, a reduce of sharded gradients sums them over the shard axis: this rank's slice is then
    reduced once more, over `replicate`, and is complete after the wait for that. Where optimizer state is sharded over
    both, each rank updates a part of that slice, and `gather slice` gathers the updated slice over `replicate`.

    `gather scales`: each rank takes the maxima of its slices of the weights that are gathered in fp8, and all ranks
    agree on one scale per weight.

    Matrices that an optimizer needs whole, and their gradients, are sent to their owners before an update; their new
    values are sent back into slices after it.
    """

    GATHER = "gather"
    WAIT_GATHER = "wait gather"
    FORWARD = "forward"
    FREE = "free"
    BACKWARD = "backward"
    TAKE_GRADS = "take grads"
    REDUCE = "reduce"
    WAIT_REDUCE = "wait reduce"
    REDUCE_SLICE = "reduce slice"
    WAIT_SLICE = "wait slice"
    GATHER_SLICE = "gather slice"
    WAIT_GATHER_SLICE = "wait gather slice"
    REDUCE_FLAGS = "reduce flags"
    BROADCAST = "broadcast"
    GATHER_SCALES = "gather scales"
    TO_OWNERS = "to owners"
    UPDATE = "update"
    FROM_OWNERS = "from owners"

    # Members are single objects. Enum's own hash is written in Python, and rows are looked up in every hook.
    __hash__ = object.__hash__

    @property
    def stream(self) -> str:
        """The queue that it runs in: `compute`, `gather` or `reduce`; waits and frees run on `compute`.

        A broadcast, a gather of scales, or a transfer to or from owners, has no separate wait: it ends before anything
        else begins. Flags (one per parameter: did this rank use it?) have none either: a rank reads them only if it
        left one unused. Slices of gradients and of parameters take turns over `replicate`.
        """
        if self in (Kind.GATHER, Kind.GATHER_SCALES, Kind.TO_OWNERS, Kind.FROM_OWNERS):
            return "gather"
        reduces = (Kind.REDUCE, Kind.REDUCE_SLICE, Kind.GATHER_SLICE, Kind.REDUCE_FLAGS, Kind.BROADCAST)
        return "reduce" if self in reduces else "compute"


ON_BUCKETS = (Kind.REDUCE, Kind.WAIT_REDUCE, Kind.REDUCE_SLICE, Kind.WAIT_SLICE)
"""Operations on a bucket; all others are on a unit."""

COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
"""Operations that compute; all strategies have the same ones in the same order."""

WAITS = {
    Kind.WAIT_GATHER: Kind.GATHER,
    Kind.WAIT_REDUCE: Kind.REDUCE,
    Kind.WAIT_SLICE: Kind.REDUCE_SLICE,
    Kind.WAIT_GATHER_SLICE: Kind.GATHER_SLICE,
}
"""Wait → the operation that it waits for."""


class Trigger(Enum):
    """The events of a step, each of which has its rule (rules/); and the events outside of one (rules/demand.py)."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    GRADS_READY = "grads ready"
    BACKWARD_DONE = "backward done"
    AFTER_STEP = "after step"

    DEMANDED = "demanded"
    AGREED = "agreed"
    RELEASED = "released"
    CAUGHT_UP = "caught up"
    EDITED = "edited"

    __hash__ = object.__hash__


OF_A_STEP = (
    Trigger.BEFORE_FORWARD,
    Trigger.AFTER_FORWARD,
    Trigger.BEFORE_BACKWARD,
    Trigger.GRADS_READY,
    Trigger.BACKWARD_DONE,
    Trigger.AFTER_STEP,
)
"""The triggers of a step, in the order in which they happen to a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on one unit, or on one bucket for reduces.

    `num_bytes` counts for the whole group: the full parameters of a gather, the full gradients of a reduce, one slice
    of them where that is reduced or gathered, all matrices that go to or from owners; 0 for the others.

    `is_local`: a collective in a group of one rank. Nothing is sent: a gather casts the slice, which is everything,
    into its place, and a reduce leaves the sum as it is.
    """

    kind: Kind
    subject: str
    num_bytes: int = 0
    is_local: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value} {self.subject}"


def crossing_buckets(operations: Iterable[Operation]) -> frozenset[str]:
    """Return the buckets whose slices are also reduced over a second axis of the mesh."""
    return frozenset(operation.subject for operation in operations if operation.kind is Kind.REDUCE_SLICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive units, in the order of backward, of one placement, whose gradients are reduced together.

    Or a piece of a large unit's sharded gradients: number `piece` of `num_pieces`.
    """

    name: str
    units: tuple[str, ...]
    num_bytes: int
    piece: int = 0
    num_pieces: int = 1

    @property
    def is_last(self) -> bool:
        """Return whether all gradients of its units are reduced with it: it is no piece, or the last one."""
        return self.piece == self.num_pieces - 1

    def taken_as(self, unit: str) -> str:
        """Return the subject of the operation that takes a unit's gradients for it."""
        return unit if self.num_pieces == 1 else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The operations for when `trigger` happens to `unit` for the `call`-th time in a step."""

    trigger: Trigger
    unit: str
    call: int
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """One step: its rows in order, and the buckets in the order in which they are reduced."""

    rows: tuple[Row, ...]
    buckets: tuple[Bucket, ...]

    def operations(self) -> Iterator[Operation]:
        """Return all operations of a step, in order."""
        return (operation for row in self.rows for operation in row.operations)

    def index(self, trigger: Trigger) -> int:
        """Return the index of the first row of this trigger."""
        return next(index for index, row in enumerate(self.rows) if row.trigger is trigger)

    @property
    def first_of_backward(self) -> int:
        """The index of the row with which backward begins."""
        forward = (Trigger.BEFORE_FORWARD, Trigger.AFTER_FORWARD)
        return next(index for index, row in enumerate(self.rows) if row.trigger not in forward)

    def gathered_after_forward(self) -> set[str]:
        """Return the sharded units that forward leaves gathered for backward."""
        gathered: set[str] = set()
        for row in self.rows[: self.first_of_backward]:
            for operation in row.operations:
                if operation.kind is Kind.GATHER:
                    gathered.add(operation.subject)
                elif operation.kind is Kind.FREE:
                    gathered.discard(operation.subject)
        return gathered
