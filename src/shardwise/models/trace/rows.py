"""The records of a step at several sizes → rows whose numbers are laws."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from shardwise.base.errors import InvalidModel
from shardwise.models.trace.recorder import Accumulated, Born, Did, Died, RowMark, TraceEntry
from shardwise.program.spec import ROOT
from shardwise.program.spec.step import BEFORE_FORWARD, Act, Law, Op, Run, StepRow, StorageEvent, Stream, What, fit

Size = tuple[int, int]
"""(batch, length of a sample)."""


@dataclass(slots=True)
class _Storage:
    """The unit that allocated a storage, and its number among that unit's allocations."""

    unit: str
    ordinal: int
    what: What
    num_bytes: Law
    # The unit whose parameter it is the gradient of.
    owner: str = ""


@dataclass(slots=True)
class _Draft:
    """A row in the making."""

    trigger: str
    unit: str
    call: int
    events: list[StorageEvent] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    # Position among the events → storage of another unit that is released there.
    foreign_releases: dict[int, _Storage] = field(default_factory=dict)


def to_rows(
    records: Mapping[Size, Sequence[TraceEntry]], *, name: str, runs: Sequence[Run] = ()
) -> tuple[StepRow, ...]:
    """Return the rows that all records agree on. The first one, before the root's forward, belongs to the loss.

    If a row releases the same storage of the second and third unit of a run, it does so for all between its ends.
    Raises InvalidModel if the operations depend on the size, or a number follows no law.
    """
    sizes = list(records)
    lengths = {len(entries) for entries in records.values()}
    if len(lengths) > 1:
        _structure_differs(name)
    gradients = {entry.storage: entry.unit for entry in records[sizes[0]] if isinstance(entry, Accumulated)}
    maker = _Maker(name, gradients=gradients)
    for entries in zip(*records.values(), strict=True):
        maker.take(dict(zip(sizes, entries, strict=True)))
    for draft in maker.drafts:
        draft.events = _resolved_events(draft, runs=runs)
    return tuple(
        StepRow(
            trigger=draft.trigger,
            unit=draft.unit,
            call=draft.call,
            stream=Stream(events=tuple(draft.events), ops=tuple(draft.ops)),
        )
        for draft in maker.drafts
        if draft.events or draft.ops or draft is not maker.drafts[0]
    )


class _Maker:
    def __init__(self, name: str, *, gradients: Mapping[int, str]) -> None:
        self.name = name
        self.gradients = gradients
        self.drafts = [_Draft(BEFORE_FORWARD, ROOT, -1)]
        self.storages: dict[int, _Storage] = {}
        self.counts: dict[str, int] = {}

    def take(self, entries: Mapping[Size, TraceEntry]) -> None:
        first = next(iter(entries.values()))
        if any(type(entry) is not type(first) for entry in entries.values()):
            _structure_differs(self.name)
        match first:
            case RowMark():
                self.drafts.append(_Draft(first.trigger, first.unit, first.call))
            case Born():
                self._born(first, self._law(entries, "num_bytes", what="a storage"))
            case Died():
                self._died(self.storages[first.storage])
            case Accumulated():
                self._event(Act.ACCUMULATED, self.storages[first.storage])
            case Did():
                self._did(first, entries)

    def _born(self, entry: Born, num_bytes: Law) -> None:
        unit = self.drafts[-1].unit
        ordinal = self.counts[unit] = self.counts.get(unit, -1) + 1
        what = What.WEIGHT_COPY if entry.is_weight_copy else What.ACTIVATION
        owner = ""
        if entry.storage in self.gradients:
            what, owner = What.GRADIENT, self.gradients[entry.storage]
        self.storages[entry.storage] = _Storage(unit, ordinal, what, num_bytes, owner)
        self._event(Act.BORN, self.storages[entry.storage])

    def _died(self, storage: _Storage) -> None:
        if storage.what is not What.GRADIENT:
            self._event(Act.DIED, storage)

    def _event(self, act: Act, storage: _Storage) -> None:
        draft = self.drafts[-1]
        here = draft.unit
        if act is Act.DIED and storage.unit != here:
            draft.foreign_releases[len(draft.events)] = storage
        draft.events.append(
            StorageEvent(
                act=act,
                what=storage.what,
                num_bytes=storage.num_bytes,
                ordinal=storage.ordinal if storage.unit == here else None,
                owner="" if storage.owner == here else storage.owner,
            )
        )

    def _did(self, entry: Did, entries: Mapping[Size, TraceEntry]) -> None:
        names = {other.name for other in entries.values() if isinstance(other, Did)}
        if len(names) > 1:
            _structure_differs(self.name)
        dims = (
            self._fit({size: did.dims[index] for size, did in _dids(entries)}, what=entry.name)
            for index in range(len(entry.dims))
        )
        op = Op(
            name=entry.name,
            num_flops=self._law(entries, "num_flops", what=entry.name),
            num_bytes=self._law(entries, "num_bytes", what=entry.name),
            dims=tuple(dims),
        )
        self.drafts[-1].ops.append(op)
        scratch = self._law(entries, "scratch_bytes", what=entry.name)
        if any(scratch.terms):
            self.drafts[-1].events.append(StorageEvent(act=Act.BORN, what=What.SCRATCH, num_bytes=scratch))
        if entry.sums is not None:
            rows = {size: did.sums[0] for size, did in _dids(entries) if did.sums is not None}
            law = self._fit(rows, what=entry.name)
            event = StorageEvent(act=Act.BORN, what=What.SCRATCH, num_bytes=law, columns=entry.sums[1])
            self.drafts[-1].events.append(event)

    def _law(self, entries: Mapping[Size, TraceEntry], attribute: str, *, what: str) -> Law:
        return self._fit({size: getattr(entry, attribute) for size, entry in entries.items()}, what=what)

    def _fit(self, values: Mapping[Size, int], *, what: str) -> Law:
        law = fit(values)
        if law is None:
            row = self.drafts[-1]
            raise InvalidModel(
                f"{self.name} cannot be planned: {what} in the {row.trigger.split()[1]} of {row.unit} does not grow "
                f"in proportion to the batch ({', '.join(f'{b}: {value:,}' for (b, _), value in values.items())})"
            )
        return law


def _resolved_events(draft: _Draft, *, runs: Sequence[Run]) -> list[StorageEvent]:
    """Return the draft's events, in which releases for a run's second and third unit are merged into one.

    Allocations of the root keep their owner's name, except in a row that stands for several units: each of those may
    release another allocation.
    """
    places = {(storage.unit, storage.ordinal): place for place, storage in draft.foreign_releases.items()}
    events: list[StorageEvent | None] = list(draft.events)
    if not any(draft.unit in run.traced[1:3] for run in runs):
        for (unit, ordinal), place in places.items():
            if unit == ROOT:
                events[place] = replace(draft.events[place], ordinal=ordinal, owner=ROOT)
    for run in runs:
        _, second, third, _ = run.traced
        for (unit, ordinal), place in places.items():
            if unit == second and (third, ordinal) in places and draft.unit not in (second, third):
                events[place] = replace(draft.events[place], each_of=second)
                events[places[third, ordinal]] = None
    return [event for event in events if event is not None]


def _dids(entries: Mapping[Size, TraceEntry]) -> Iterable[tuple[Size, Did]]:
    return ((size, entry) for size, entry in entries.items() if isinstance(entry, Did))


def _structure_differs(name: str) -> NoReturn:
    raise InvalidModel(
        f"{name} cannot be planned: it runs other operations for another batch size; give make_batch and loss a form "
        "that does the same for every size"
    )
