"""The operations of a step program on tensors."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor

from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.first_forward import FirstForward
from shardwise.engine.core.flat import refresh
from shardwise.engine.core.guests import Scales
from shardwise.engine.core.segment import Segment
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.used import UsedFlags
from shardwise.program import Kind, Operation, Row, Trigger
from shardwise.program.compiled_program import Action
from shardwise.program.spec import ROOT

MakeAction = Callable[[Operation], Action]


class EngineExecutor:
    """Turns each operation into what a rank does for it.

    serve        sees to it that a unit that computes is gathered
    first        while the order is learned: ranks agree on each gather
    scales       of weights that are gathered in fewer bits; None: there are none
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        *,
        broadcast_buffers: Callable[[], None],
        serve: Callable[[Unit], None],
        setting: CoreSetting,
    ) -> None:
        self.units = units
        self.flags = UsedFlags(units.values(), setting=setting)
        self.broadcast_buffers = broadcast_buffers
        self.serve = serve
        self.tape, self._setting = setting.tape, setting
        self._others: dict[Kind, MakeAction] = {}
        self.first: FirstForward | None = None
        self.scales: Scales | None = None
        self.hold_buckets(())

    def add(self, kind: Kind, make_action: MakeAction) -> None:
        """Run operations of a kind that the core does not know (matrices that go to their owners)."""
        self._others[kind] = make_action

    def scale_by(self, scales: Scales) -> None:
        """Gather some weights in fewer bits, by these scales."""
        self.scales = scales

    def observe(self, first: FirstForward | None) -> None:
        """Have ranks agree on each gather of this forward; None: they follow the program."""
        self.first = first

    def cover(self) -> None:
        """Have a flag and a scale for each parameter that the units hold now."""
        self.flags.cover()
        if self.scales is not None:
            self.scales.cover()

    def hold_buckets(self, buckets: Iterable[ReduceBucket]) -> None:
        """Reduce gradients in these buckets from here on."""
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self._takes = {
            bucket.bucket.taken_as(unit.name): partial(bucket.take_grads, unit)
            for bucket in self.buckets.values()
            for unit in bucket.units
        }

    def action(self, operation: Operation, row: Row) -> Action:
        name, kind = operation.subject, operation.kind
        match kind:
            case Kind.GATHER:
                return self._gather(self.units[name], operation, row)
            case Kind.WAIT_GATHER:
                return self.units[name].wait_gather
            case Kind.GATHER_SLICE:
                return partial(self.units[name].gather_slice, updated=row.trigger is Trigger.AFTER_STEP)
            case Kind.WAIT_GATHER_SLICE:
                return self.units[name].wait_gather_slice
            case Kind.FREE:
                return self.units[name].free
            case Kind.FORWARD | Kind.BACKWARD:
                return partial(self.compute, self.units[name], kind)
            case Kind.TAKE_GRADS:
                return self._takes[name]
            case Kind.REDUCE:
                return partial(self.buckets[name].start, is_local=operation.is_local)
            case Kind.WAIT_REDUCE:
                return self.buckets[name].finish
            case Kind.REDUCE_SLICE:
                return self.buckets[name].start_slice
            case Kind.WAIT_SLICE:
                return self.buckets[name].finish_slice
            case Kind.REDUCE_FLAGS:
                return partial(self.flags.start, is_local=operation.is_local)
            case Kind.BROADCAST:
                return partial(self.tape.record, kind, ROOT) if operation.is_local else self.broadcast_buffers
            case Kind.GATHER_SCALES:
                return partial(self._refresh_scales, is_local=operation.is_local)
            case Kind.UPDATE:
                return self._updated
            case _:
                # Looked up when it runs: the shell adds it once the core is there.
                return lambda: self._others[kind](operation)()

    def _refresh_scales(self, *, is_local: bool) -> None:
        for unit in self.units.values():
            unit.wait_gather_slice()
        assert self.scales is not None
        self.scales.refresh(is_local=is_local)

    def _gather(self, unit: Unit, operation: Operation, row: Row) -> Action:
        if row.trigger is Trigger.AFTER_STEP:
            return partial(unit.gather_updated, is_local=operation.is_local)
        if self.first is not None and row.trigger is Trigger.BEFORE_FORWARD and not operation.is_local:
            return partial(self.first.want, unit)
        return partial(unit.gather, is_local=operation.is_local)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        """Take part in the gathers of units that this rank does not call, and free what it does not need."""
        unit = self.units.get(operation.subject)
        if unit is not None and operation.kind is Kind.GATHER:
            return partial(unit.gather, is_local=operation.is_local)
        if unit is not None and operation.kind is Kind.FREE:
            return unit.free_unused
        return None

    def is_ready(self, unit: str) -> bool:
        """Other parameters of one that is partly frozen may be needed yet: it is closed when backward has left it, or,
        where several forwards are gone back through, when it is over.
        """
        found = self.units[unit]
        return found.grads.complete and not (found.sharded and found.partly_frozen)

    def compute(self, unit: Unit, kind: Kind) -> None:
        """Make a unit ready to compute."""
        if not unit.arrived or not unit.whole:
            self.serve(unit)
        elif unit.at_rest:
            unit.wake()
        self.tape.record(kind, unit.name)

    def end_first_forward(self) -> None:
        """End a first forward on all ranks, unless they have: what comes next may be no backward."""
        if self.first is not None and not self.first.ended:
            self.first.end()

    def _updated(self) -> None:
        self.tape.record(Kind.UPDATE, ROOT)
        refresh([flat for unit in self.units.values() for flat in unit.updated()])

    # Gradients between backwards

    @property
    def _segments(self) -> list[Segment]:
        return [segment for bucket in self.buckets.values() for segment in bucket.segments]

    @property
    def holds_grads(self) -> bool:
        """Return whether gradients are summed on this rank alone, for a later backward to reduce."""
        return any(segment.holds for segment in self._segments) or self.holds_slices

    @property
    def holds_slices(self) -> bool:
        """Return whether they are summed over the shard axis already."""
        return any(segment.holds_slice for segment in self._segments)

    @property
    def can_undo_grads(self) -> bool:
        """Return whether the gradients from before a backward that raised are still there."""
        flats = (flat for unit in self.units.values() for flat in unit.flats)
        return not self.holds_grads and all(flat.grads.can_undo for flat in flats)

    def keep_grads(self) -> None:
        """Backward is over: its gradients stay on this rank, for a later one to reduce."""
        for segment in self._segments:
            segment.keep()

    def take_held(self) -> dict[int, Tensor]:
        """Return what is held, by id of its parameter, and give up the buffers that are kept from step to step."""
        held: dict[int, Tensor] = {}
        for segment in self._segments:
            segment.add_held(held)
        for segment in self._segments:
            segment.discard()
        return held

    def hold(self, held: dict[int, Tensor]) -> None:
        """Take over sums that another plan's buckets have held; each leaves `held` as it is taken."""
        for segment in self._segments:
            segment.hold(held)

    def forget_grads(self, names: AbstractSet[str]) -> None:
        """Clear what is held for the parameters of these names."""
        for segment in self._segments:
            segment.forget(names)

    def drop_reduces(self) -> None:
        """Forget what a backward that raised has left under way, once it no longer writes."""
        for segment in self._segments:
            segment.drop()
