"""What one training step of a model does on one device: every storage's birth and death, and every operation.

A step is a list of rows. A row is something that happens to a unit (its forward begins, its gradients are ready …:
the triggers of the step program, by the same names), and the stream of what follows until the next row. Strategies
are not in it: the planner overlays them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shardwise.spec.law import Law

BEFORE_FORWARD = "before forward"
AFTER_FORWARD = "after forward"
BEFORE_BACKWARD = "before backward"
GRADS_READY = "grads ready"
BACKWARD_DONE = "backward done"

COMPILED = {"none": "compiled", "full": "compiled-full"}
"""Recompute → what a trace has in its place, if its units but the root are compiled by inductor."""


class Act(Enum):
    """What befalls a storage."""

    BORN = "+"
    DIED = "-"
    # A gradient is in `parameter.grad`, where the engine finds it; when it dies is the engine's business.
    ACCUMULATED = "="


class What(Enum):
    """What a storage holds."""

    ACTIVATION = "a"
    GRADIENT = "g"
    # A parameter in another dtype, as autocast makes them.
    WEIGHT_COPY = "w"
    # Lives inside one operation.
    SCRATCH = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageEvent:
    """One storage's birth or death.

    `ordinal` counts the births of a unit through a step; None for the death of a storage that another unit bore, unless
    that is named.
    `owner` is the unit whose parameter a gradient is of, or that bore what dies; "" for the row's own.
    `each_of`: the storage dies of every unit between the ends of the run whose second unit is named.
    `columns`: scratch of a sum into so many columns, which the planner knows; `num_bytes` then counts the rows.
    """

    act: Act
    what: What
    num_bytes: Law
    ordinal: int | None = None
    owner: str = ""
    each_of: str = ""
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation that computes. `num_flops` of causal attention is the half that is computed.

    `dims` of a matrix product: (m, n, k), after a count where it is batched; of attention: heads in the batch, queries,
    keys, how wide a head is; of an elementwise operation whose operands do not lie alike: elements of its result.
    """

    name: str
    num_flops: Law
    num_bytes: Law
    dims: tuple[Law, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What happens between two rows, in order."""

    events: tuple[StorageEvent, ...] = ()
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """`trigger` happens to `unit`, in its `call`-th call, and then the stream follows."""

    trigger: str
    unit: str
    call: int = 0
    stream: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Units of one kind, called one after another, of which only some were traced.

    The first, second, third and last were. The second and third did the same, so all between the first and the last do.
    """

    units: tuple[str, ...]

    @property
    def traced(self) -> tuple[str, str, str, str]:
        return (*self.units[:3], self.units[-1])  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A step in one way of computing (`fp32`, `bf16`, `autocast`) and of recomputing; n equal blocks are held once.

    `recompute` also says whether units are compiled (COMPILED). Such a trace knows memory alone, and no operations: how
    long compiled units take follows from those that the compiler fuses.
    """

    computes_in: str
    recompute: str
    rows: tuple[StepRow, ...]
    runs: tuple[Run, ...] = ()

    def expand(
        self, chosen: Mapping[Run, Sequence[str]] | None = None, *, num_units: Mapping[Run, int] | None = None
    ) -> Iterator[StepRow]:
        """The rows of all units, or, of the units of a run, of those that are chosen: its ends among them.

        `num_units`: how many units those of a run stand for, if for more than themselves.
        """
        chosen, num_units = chosen or {}, num_units or {}
        middles = {run.traced[1]: list(chosen.get(run, run.units))[1:-1] for run in self.runs}
        counts = {run.traced[1]: num_units.get(run, len(middles[run.traced[1]]) + 2) - 2 for run in self.runs}
        left_out = {run.traced[2] for run in self.runs}
        for phase, group in _phases(_multiplied(row, counts) for row in self.rows):
            if group[0].unit in left_out:
                continue
            names = middles.get(group[0].unit, [group[0].unit])
            for name in names if phase == "forward" else reversed(names):
                yield from (replace(row, unit=name) if row.unit != name else row for row in group)


def _multiplied(row: StepRow, counts: Mapping[str, int]) -> StepRow:
    """What dies of each of several units dies as often."""
    if not any(event.each_of for event in row.stream.events):
        return row
    events = tuple(event for event in row.stream.events for _ in range(counts.get(event.each_of, 1)))
    return replace(row, stream=replace(row.stream, events=events))


def _phases(rows: Iterable[StepRow]) -> Iterator[tuple[str, list[StepRow]]]:
    """("forward" or "backward", consecutive rows of one unit)."""
    group: list[StepRow] = []
    for row in rows:
        phase = _phase(row)
        if group and (row.unit != group[0].unit or phase != _phase(group[0])):
            yield _phase(group[0]), group
            group = []
        group.append(row)
    if group:
        yield _phase(group[0]), group


def _phase(row: StepRow) -> str:
    return "forward" if row.trigger in (BEFORE_FORWARD, AFTER_FORWARD) else "backward"
