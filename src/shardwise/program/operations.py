"""The operations of a step, and the program that lists them: data, not code."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an operation does; the value is the verb that pictures and tapes show.

    `take grads` moves a unit's gradients into the buffer that its bucket is reduced in.

    On a mesh with a second axis, a reduce of sharded gradients sums them over the shard axis: this rank's slice is then
    reduced once more, over `replicate`, and is a gradient when that has been waited for.

    Matrices that an optimizer needs whole, and their gradients, go to their owners before an update, and their new
    values back into slices after it.
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
    REDUCE_FLAGS = "reduce flags"
    BROADCAST = "broadcast"
    TO_OWNERS = "to owners"
    UPDATE = "update"
    FROM_OWNERS = "from owners"

    # Members are single objects. Enum's own hash is written in Python, and rows are looked up in every hook.
    __hash__ = object.__hash__

    @property
    def stream(self) -> str:
        """The queue it runs in: `compute`, `gather` or `reduce`; waits and frees happen on `compute`.

        A broadcast, and what goes to and from owners, has no wait of its own: it is over before anything else begins.
        Nor have flags (one per parameter: did this rank use it?): only a rank that left a parameter unused has to read
        whether all others did.
        """
        if self in (Kind.GATHER, Kind.TO_OWNERS, Kind.FROM_OWNERS):
            return "gather"
        reduces = (Kind.REDUCE, Kind.REDUCE_SLICE, Kind.REDUCE_FLAGS, Kind.BROADCAST)
        return "reduce" if self in reduces else "compute"


ON_BUCKETS = (Kind.REDUCE, Kind.WAIT_REDUCE, Kind.REDUCE_SLICE, Kind.WAIT_SLICE)
"""What is done to a bucket; all else is done to a unit."""

COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
"""What computes; all strategies have the same ones in the same order."""

WAITS = {Kind.WAIT_GATHER: Kind.GATHER, Kind.WAIT_REDUCE: Kind.REDUCE, Kind.WAIT_SLICE: Kind.REDUCE_SLICE}
"""A wait → what it waits for."""


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
"""The triggers of a step, in the order in which a unit comes to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on one unit, or on one bucket for reduces.

    `num_bytes` is what the whole group works on: the full parameters of a gather, the full gradients of a
    reduce, one slice of them where that is reduced, all matrices that go to or from owners; 0 for the others.

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
    """The buckets of which a slice is reduced over a second axis of the mesh before it is a gradient."""
    return frozenset(operation.subject for operation in operations if operation.kind is Kind.REDUCE_SLICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive units, in the order of backward, of one placement, whose gradients are reduced together."""

    name: str
    units: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is to be done when `trigger` happens to `unit` for the `call`-th time in a step."""

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
        """All operations of a step, in order."""
        return (operation for row in self.rows for operation in row.operations)

    def index(self, trigger: Trigger) -> int:
        """The index of the first row of this trigger."""
        return next(index for index, row in enumerate(self.rows) if row.trigger is trigger)

    @property
    def first_of_backward(self) -> int:
        """The index of the row with which backward begins."""
        forward = (Trigger.BEFORE_FORWARD, Trigger.AFTER_FORWARD)
        return next(index for index, row in enumerate(self.rows) if row.trigger not in forward)

    def gathered_after_forward(self) -> set[str]:
        """The sharded units that forward leaves gathered for backward."""
        gathered: set[str] = set()
        for row in self.rows[: self.first_of_backward]:
            for operation in row.operations:
                if operation.kind is Kind.GATHER:
                    gathered.add(operation.subject)
                elif operation.kind is Kind.FREE:
                    gathered.discard(operation.subject)
        return gathered
