"""What torch's own engines allocate and free in a step: DistributedDataParallel, and `fully_shard`.

Read from torch 2.11 to 2.13: torch/csrc/distributed/c10d/reducer.cpp and torch/distributed/fsdp/_fully_shard
(_fsdp_param_group.py, _fsdp_collectives.py), as torch_engine/prepare.py sets them up.

DDP           Parameters and their gradients' buckets are there all the time. A gradient is copied into its bucket as
              soon as autograd has made it, and freed (gradient_as_bucket_view).
fully_shard   Every parameter is cut along its first dimension, padded to a multiple of the ranks. A gather fills one
              flat buffer, which is then copied out, parameter by parameter. In forward the flat buffer stays until the
              next unit's has come; in backward the next unit's is gathered while this one computes. Gradients are
              copied into one buffer in the reduce dtype, which stays until the next unit's are there. One rank gathers
              nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.dtypes import BYTES_PER_ELEMENT, PRECISIONS
from shardwise.placement import Placement
from shardwise.plan import Plan
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, TakeGrads
from shardwise.planner.memory.states import OptimizerRule, UnitStates, moment_bytes, rounded
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.program.buffers import param_dtypes
from shardwise.spec import ROOT, TensorSpec, UnitSpec
from shardwise.spec.step import AFTER_FORWARD, BACKWARD_DONE, BEFORE_BACKWARD, BEFORE_FORWARD, GRADS_READY

# Streams with memory of their own.
_GATHER, _REDUCE = "gather", "reduce"

Key = tuple[str, str, int]
Changes = Iterator[MemoryChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUnit:
    """Bytes of a unit under fully_shard, beside its UnitStates: for a gather, the flat buffer, what it is filled from,
    and the parameters that are copied out of it.
    """

    flat: int
    copy_in: int
    outputs: tuple[int, ...]


def replicated_states(unit: UnitSpec, *, plan: Plan, optimizer: OptimizerRule, rules: MemoryRules) -> UnitStates:
    """DDP: parameters as the optimizer steps them, and a bucket's place for each gradient."""
    params = [(param, param.num_elements * _master_bytes(param, plan=plan)) for param in unit.params]
    trainable = [size for param, size in params if param.trainable]
    held = tuple(rounded(size, rules=rules) for _, size in params)
    moments = moment_bytes(trainable, optimizer=optimizer, rules=rules)
    return UnitStates(
        full=0,
        params=sum(held),
        optim=sum(moments),
        moments=moments,
        held=held,
        reduce=0,
        grads=sum(trainable),
        owned=sum(trainable),
        largest=max(trainable, default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
    )


def sharded_states(
    unit: UnitSpec, *, plan: Plan, num_slices: int, optimizer: OptimizerRule, rules: MemoryRules
) -> tuple[UnitStates, ShardedUnit]:
    """fully_shard: what rank 0 has of each parameter."""
    shards = [(param, _shard_elements(param, num_slices=num_slices)) for param in unit.params]
    stepped = [(param, count * _master_bytes(param, plan=plan)) for param, count in shards]
    trainable = [size for param, size in stepped if param.trainable]
    computes = [(count, _compute_bytes(param, plan=plan)) for param, count in shards]
    casts = any(size != _master_bytes(param, plan=plan) for (_, size), param in zip(computes, unit.params, strict=True))
    reduced = (
        sum(count for param, count in shards if param.trainable) * BYTES_PER_ELEMENT[PRECISIONS[plan.reduce_dtype]]
    )
    held = tuple(rounded(size, rules=rules) for _, size in stepped)
    moments = moment_bytes(trainable, optimizer=optimizer, rules=rules)
    outputs = tuple(rounded(num_slices * count * size, rules=rules) for count, size in computes)
    states = UnitStates(
        full=sum(outputs),
        params=0 if casts else sum(held),
        optim=sum(moments) + (sum(held) if casts else 0),
        moments=moments,
        held=held,
        reduce=rounded(num_slices * reduced, rules=rules),
        grads=rounded(sum(trainable), rules=rules),
        owned=sum(trainable),
        largest=max(trainable, default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
    )
    in_shard = sum(count * size for count, size in computes)
    largest = max((count * size for count, size in computes), default=0)
    if num_slices == 1:
        # Each parameter is cast, and copied, by itself.
        return states, ShardedUnit(flat=0, copy_in=largest if casts else 0, outputs=outputs)
    return states, ShardedUnit(
        flat=rounded(num_slices * in_shard, rules=rules),
        copy_in=rounded(in_shard, rules=rules) if casts else 0,
        outputs=outputs,
    )


def _compute_bytes(param: TensorSpec, *, plan: Plan) -> int:
    return BYTES_PER_ELEMENT[param_dtypes(param, plan=plan)[0]]


def _master_bytes(param: TensorSpec, *, plan: Plan) -> int:
    return BYTES_PER_ELEMENT[param_dtypes(param, plan=plan)[1]]


def _shard_elements(param: TensorSpec, *, num_slices: int) -> int:
    """The elements of the largest shard, to which all others are padded."""
    if not param.shape:
        return 1
    rows = -(-param.shape[0] // num_slices)
    return rows * (param.num_elements // param.shape[0]) if param.shape[0] else 0


def replicated_rows(
    peaks: Sequence[tuple[Key, StreamPeak]], *, weights: Mapping[str, int], update_bytes: int
) -> Iterator[MemoryRow]:
    """DDP: the model alone, whose gradients leave as soon as they are there."""
    for (trigger, unit, _), peak in peaks:
        yield MemoryRow(label=f"{trigger} {unit}", unit=unit, peak=peak, repeats=weights.get(unit, 1))
    yield _update(update_bytes)


def _update(update_bytes: int) -> MemoryRow:
    changes = (Change("other", update_bytes), Change("other", -update_bytes))
    return MemoryRow(label=f"after step {ROOT}", unit=ROOT, changes=changes)


def sharded_rows(
    peaks: Sequence[tuple[Key, StreamPeak]],
    *,
    placements: Mapping[str, Placement],
    states: Mapping[str, UnitStates],
    units: Mapping[str, ShardedUnit],
    weights: Mapping[str, int],
    update_bytes: int,
) -> Iterator[MemoryRow]:
    """fully_shard, on each unit and on the root, which is not freed after forward."""
    engine = _FullyShard(placements=placements, states=states, units=units, weights=weights)
    for key, peak in peaks:
        trigger, unit, _ = key
        changes = tuple(engine.at(trigger, unit))
        yield MemoryRow(label=f"{trigger} {unit}", unit=unit, changes=changes, peak=peak, repeats=weights.get(unit, 1))
    yield _update(update_bytes)


class _FullyShard:
    """Which units are whole, and which buffers are there."""

    def __init__(
        self,
        *,
        placements: Mapping[str, Placement],
        states: Mapping[str, UnitStates],
        units: Mapping[str, ShardedUnit],
        weights: Mapping[str, int],
    ) -> None:
        self.placements, self.states, self.units, self.weights = placements, states, units, weights
        self.whole: set[str] = set()
        self.done: set[str] = set()
        self.after_forward: list[str] = []
        # Flat buffers: the one that the last gather of forward left, and those that were gathered ahead.
        self.left: str | None = None
        self.ahead: set[str] = set()
        self.reducing: str | None = None

    def at(self, trigger: str, unit: str) -> Changes:
        match trigger:
            case _ if trigger == BEFORE_FORWARD:
                yield from self.gather_in_forward(unit)
            case _ if trigger == AFTER_FORWARD:
                yield from self.leave_forward(unit)
            case _ if trigger == BEFORE_BACKWARD:
                yield from self.enter_backward(unit)
            case _ if trigger == GRADS_READY and unit != ROOT:
                yield from self.reduce(unit)
            case _ if trigger == BACKWARD_DONE:
                for other in self.states:
                    yield from self.reduce(other)
                yield from self.free_reduced()

    def gather_in_forward(self, unit: str) -> Changes:
        if unit in self.whole:
            return
        self.whole.add(unit)
        yield from self.fill_flat(unit)
        yield from self.drop_left()
        yield self.copied_out(unit)
        yield Change("gathered", self.kept_of_others(unit), is_beside=True)
        self.left = unit

    def fill_flat(self, unit: str) -> Changes:
        yield Change("gathered", self.units[unit].copy_in, stream=_GATHER)
        yield Change("gathered", self.units[unit].flat, stream=_GATHER)
        yield Change("gathered", -self.units[unit].copy_in)

    def kept_of_others(self, unit: str) -> int:
        """What units that are left out keep gathered between forward and backward."""
        kept = unit != ROOT and not self.placements[unit].reshard_after_forward
        return (self.weights.get(unit, 1) - 1) * self.states[unit].full if kept else 0

    def copied_out(self, unit: str) -> Change:
        return Change("gathered", self.states[unit].full, pieces=self.units[unit].outputs)

    def drop_left(self) -> Changes:
        if self.left is not None:
            yield Change("gathered", -self.units[self.left].flat)
        self.left = None

    def leave_forward(self, unit: str) -> Changes:
        self.after_forward.append(unit)
        if unit == ROOT:
            yield from self.drop_left()
        elif self.placements[unit].reshard_after_forward and unit in self.whole:
            self.whole.discard(unit)
            yield Change("gathered", -self.states[unit].full)

    def enter_backward(self, unit: str) -> Changes:
        if unit not in self.whole:
            self.whole.add(unit)
            if unit not in self.ahead:
                yield from self.fill_flat(unit)
            self.ahead.discard(unit)
            yield self.copied_out(unit)
            yield Change("gathered", -self.units[unit].flat)
        place = self.after_forward.index(unit) if unit in self.after_forward else 0
        if place > 0 and self.after_forward[place - 1] not in self.whole:
            self.ahead.add(self.after_forward[place - 1])
            yield from self.fill_flat(self.after_forward[place - 1])

    def reduce(self, unit: str) -> Changes:
        """After a unit's backward; the root's is the last."""
        if unit in self.done:
            return
        self.done.add(unit)
        if unit in self.whole:
            self.whole.discard(unit)
            yield Change("gathered", -self.states[unit].full)
            yield Change("gathered", -self.kept_of_others(unit), is_beside=True)
        yield from self.free_reduced()
        self.reducing = unit
        yield Change("reduce", self.states[unit].reduce)
        yield TakeGrads(unit=unit)
        yield Change("grads", self.states[unit].grads, stream=_REDUCE)
        yield Change("grads", (self.weights.get(unit, 1) - 1) * self.states[unit].grads, is_beside=True)

    def free_reduced(self) -> Changes:
        if self.reducing is not None:
            yield Change("reduce", -self.states[self.reducing].reduce)
        self.reducing = None
