"""Spec + plan → the program of one step: the events of a step in order, and the operations of each by the rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.buffers import (
    gather_bytes,
    num_fp8,
    num_pieces,
    owned_bytes,
    reduce_bytes,
    update_gather_bytes,
)
from shardwise.program.operations import Bucket, Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.rules.context import Rules, StepContext, StepEvent, has_states_on_host
from shardwise.program.rules.ddp import DDP
from shardwise.program.rules.fully_shard import FULLY_SHARD
from shardwise.program.rules.learning import LEARNING, catch_up
from shardwise.program.rules.ours import OURS
from shardwise.program.spec import ANNOUNCED, NONE, ROOT, ModelSpec


def build(spec: ModelSpec, *, plan: Plan, mesh: Mesh | None = None, reduces: bool = True) -> StepProgram:
    """Return the program of a step that follows another step: forward, backward, update.

    mesh      used if the plan has none; without either, the job has several ranks
    reduces   False: the program of a pass that keeps its gradients for a later one to reduce
    """
    events, context = _events_and_context(spec, plan=plan, mesh=mesh, reduces=reduces)
    _, rows = _rows(rules_of(plan), events, context)
    return StepProgram(rows=tuple(rows), buckets=context.buckets)


def build_first_step(spec: ModelSpec, *, plan: Plan, mesh: Mesh | None = None) -> StepProgram:
    """Return the program of our engine's first step, in which ranks learn the order of units (rules/learning.py)."""
    program = build(spec, plan=plan, mesh=mesh)
    events, context = _events_and_context(spec, plan=plan, mesh=mesh, reduces=True)
    state, rows = _rows(LEARNING, events[: program.first_of_backward], context)
    first, *later = program.rows[program.first_of_backward :]
    caught_up = catch_up(program, gathered=state.gathered, gathered_by_all=state.gathered, context=context)
    first = replace(first, operations=(*caught_up.operations, *first.operations))
    return replace(program, rows=(*rows, first, *later))


def rules_of(plan: Plan) -> Rules:
    """Return the rules of the engine that runs a plan. torch has two engines; the root's placement chooses one."""
    if plan.engine == "shardwise":
        return OURS
    return FULLY_SHARD if plan.placement(ROOT).params.is_sharded else DDP


def context_of(spec: ModelSpec, *, plan: Plan, mesh: Mesh | None = None) -> StepContext:
    """Return what the rules depend on in a step."""
    return _events_and_context(spec, plan=plan, mesh=mesh, reduces=True)[1]


def _rows(rules: Rules, events: Sequence[StepEvent], context: StepContext) -> tuple[Any, list[Row]]:
    """Return the state after these events, and the row of each."""
    state, rows = rules.first_state(context), []
    for event in events:
        state, operations = rules.by_trigger[event.trigger](state, event, context)
        rows.append(Row(trigger=event.trigger, unit=event.unit, call=event.call, operations=operations))
    return state, rows


def _events_and_context(
    spec: ModelSpec, *, plan: Plan, mesh: Mesh | None, reduces: bool
) -> tuple[tuple[StepEvent, ...], StepContext]:
    """Return the events of a step, and what the rules depend on."""
    mesh = plan.mesh or mesh
    alone = mesh is not None and mesh.num_ranks == 1
    placements = plan.placements(unit.name for unit in spec.units)
    trainable = frozenset(unit.name for unit in spec.units if any(param.trainable for param in unit.params))
    backward = {unit.name: unit.backward for unit in spec.units}
    events = tuple(_events(spec.call_order, with_params={u.name for u in spec.units if u.params}, backward=backward))
    buckets = _buckets(spec, events=events, placements=placements, plan=plan)
    num_flags = sum(len(unit.params) for unit in spec.units)
    return events, StepContext(
        placements=placements,
        trainable=trainable,
        backward=backward,
        from_root=frozenset(unit.name for unit in spec.units if unit.from_root),
        inside={
            outer: tuple(unit for unit in dict.fromkeys(spec.call_order) if _is_inside(unit, outer))
            for outer in placements
            if plan.recompute_of(outer) != "none"
        },
        calls=spec.call_order,
        backward_calls=tuple(event.unit for event in events if event.trigger is Trigger.BEFORE_BACKWARD),
        buckets=buckets,
        gather_bytes={
            unit.name: gather_bytes(unit, plan=plan, sharded=placements[unit.name].params.is_sharded)
            for unit in spec.units
        },
        update_gather_bytes={unit.name: update_gather_bytes(unit, plan=plan) for unit in spec.units},
        owned_bytes={unit.name: owned_bytes(unit, plan=plan) for unit in spec.units},
        slice_bytes=_slice_bytes(buckets, placements=placements, mesh=mesh),
        num_slices=mesh.shard if mesh is not None else 1,
        broadcasts=_broadcasts(spec, is_local=alone),
        scales=_scales(spec, placements=placements, plan=plan, is_local=mesh is not None and mesh.shard == 1),
        flags=Operation(kind=Kind.REDUCE_FLAGS, subject=ROOT, num_bytes=4 * num_flags, is_local=alone),
        reduces=reduces,
        prefetch=plan.prefetch,
        reduces_in_flight=plan.reduces_in_flight,
        alone=alone,
        alone_on_shard=mesh is not None and mesh.shard == 1,
        on_host=frozenset(
            name for name, place in placements.items() if has_states_on_host(name, plan=plan, placement=place)
        ),
    )


def _events(calls: tuple[str, ...], *, with_params: set[str], backward: Mapping[str, str]) -> Iterator[StepEvent]:
    """Yield the events of a step, in order.

    A call ends when another begins that is not inside it. Backward is forward in reverse. A unit's gradients are
    complete, and its parameters no longer needed, after the backward of its first call.
    """
    forward: list[StepEvent] = []
    running: list[StepEvent] = []
    counts: dict[str, int] = {}

    def end_last(position: int) -> None:
        last = running.pop()
        forward.append(StepEvent(trigger=Trigger.AFTER_FORWARD, unit=last.unit, call=last.call, position=position))

    for position, unit in enumerate(calls):
        while running and not _is_inside(unit, running[-1].unit):
            end_last(position - 1)
        call = counts[unit] = counts.get(unit, -1) + 1
        running.append(StepEvent(trigger=Trigger.BEFORE_FORWARD, unit=unit, call=call, position=position))
        forward.append(running[-1])
    while running:
        end_last(len(calls) - 1)

    yield from forward
    backward_position = 0
    for event in reversed(forward):
        if event.trigger is Trigger.AFTER_FORWARD:
            if backward[event.unit] == ANNOUNCED:
                trigger = Trigger.BEFORE_BACKWARD
                yield StepEvent(trigger=trigger, unit=event.unit, call=event.call, position=backward_position)
                backward_position += 1
        elif event.call == 0 and event.unit in with_params and backward[event.unit] != NONE:
            yield StepEvent(trigger=Trigger.GRADS_READY, unit=event.unit)
    yield StepEvent(trigger=Trigger.BACKWARD_DONE, unit=ROOT)
    yield StepEvent(trigger=Trigger.AFTER_STEP, unit=ROOT)


def _is_inside(unit: str, outer: str) -> bool:
    return unit != outer and (outer == ROOT or unit.startswith(outer + "."))


def _buckets(
    spec: ModelSpec, *, events: tuple[StepEvent, ...], placements: Mapping[str, Placement], plan: Plan
) -> tuple[Bucket, ...]:
    """Return buckets in the order of backward: replicated gradients grouped up to bucket_bytes, sharded ones by unit.

    A unit that is never called comes last: other ranks may call it. A unit larger than piece_bytes is cut.
    """
    ready = [event.unit for event in events if event.trigger is Trigger.GRADS_READY]
    uncalled = [unit.name for unit in spec.units if unit.name not in ready]
    groups: list[list[str]] = []
    sizes: list[int] = []
    for name in (*ready, *uncalled):
        num_bytes = reduce_bytes(spec.unit(name), plan=plan)
        if not num_bytes:
            continue
        joins = (
            groups
            and not placements[name].grads.is_sharded
            and placements[groups[-1][-1]] == placements[name]
            and sizes[-1] < plan.bucket_bytes
        )
        if joins:
            groups[-1].append(name)
            sizes[-1] += num_bytes
        else:
            groups.append([name])
            sizes.append(num_bytes)
    return tuple(
        bucket
        for group, size in zip(groups, sizes, strict=True)
        for bucket in _pieces(
            Bucket(name="+".join(group), units=tuple(group), num_bytes=size),
            num_pieces=num_pieces(spec.unit(group[0]), plan=plan),
        )
    )


def _pieces(bucket: Bucket, *, num_pieces: int) -> Iterator[Bucket]:
    """Yield the pieces in which a bucket is reduced."""
    if num_pieces == 1:
        yield bucket
        return
    for piece in range(num_pieces):
        start, stop = (place * bucket.num_bytes // num_pieces for place in (piece, piece + 1))
        name = f"{bucket.name} {piece + 1}/{num_pieces}"
        yield replace(bucket, name=name, num_bytes=stop - start, piece=piece, num_pieces=num_pieces)


def _slice_bytes(
    buckets: tuple[Bucket, ...], *, placements: Mapping[str, Placement], mesh: Mesh | None
) -> dict[str, int]:
    """Return a rank's share of each bucket that is also summed over a second axis of the mesh."""
    if mesh is None or mesh.replicate == 1:
        return {}
    return {
        bucket.name: -(-bucket.num_bytes // mesh.shard)
        for bucket in buckets
        if placements[bucket.units[0]].grads.is_sharded
    }


def _scales(
    spec: ModelSpec, *, placements: Mapping[str, Placement], plan: Plan, is_local: bool
) -> tuple[Operation, ...]:
    """Return the gather of scales at the start of each forward, if weights are gathered in fp8.

    At the start, and not after the update, because weights may be written in between: loaded, averaged, edited.
    """
    sharded = [unit for unit in spec.units if placements[unit.name].params.is_sharded]
    num_bytes = 4 * sum(num_fp8(unit, plan=plan) for unit in sharded)
    sent = Operation(kind=Kind.GATHER_SCALES, subject=ROOT, num_bytes=num_bytes, is_local=is_local)
    return (sent,) if num_bytes else ()


def _broadcasts(spec: ModelSpec, *, is_local: bool) -> tuple[Operation, ...]:
    """Return the broadcast of rank 0's persistent buffers at the start of each forward, if there are any."""
    num_bytes = sum(buffer.num_bytes for unit in spec.units for buffer in unit.buffers if buffer.persistent)
    sent = Operation(kind=Kind.BROADCAST, subject=ROOT, num_bytes=num_bytes, is_local=is_local)
    return (sent,) if num_bytes else ()
