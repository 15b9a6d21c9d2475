"""Draws one step as text, for `explain`. Every line comes from the step program and the placement.

All ranks do the same at the same time, each with its own slice. So only rank 0 is drawn, after a picture of who owns
which slice.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.base.vocabulary.quantities import GIB, KIB, MIB, TIB, UnitOfMeasure, byte_unit, fixed, fixed_text
from shardwise.measure.report.snapshots import STATES, Holding, Snapshot, StepSnapshots, bucket_label, snapshots_of
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS, STRATEGIES, Mesh, Placement, Where, placement_of
from shardwise.program import Bucket, Kind, Trigger
from shardwise.program.operations import ON_BUCKETS, WAITS
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

WIDTH = 80
GLYPHS: Mapping[Holding, str] = {
    Holding.WHOLE: "█",
    Holding.SLICE: "▂",
    Holding.PART: "▁",
    Holding.ON_ITS_WAY: "░",
    Holding.DIFFERS: "▒",
    Holding.NOTHING: "·",
}
OTHER_NAMES: Mapping[Placement, str] = {
    STRATEGIES["ddp"]: "DistributedDataParallel, NO_SHARD",
    STRATEGIES["zero1"]: "ZeRO-1, optimizer-state sharding",
    STRATEGIES["zero2"]: "ZeRO-2",
    STRATEGIES["shard_grad_op"]: "SHARD_GRAD_OP, fully_shard without resharding",
    STRATEGIES["fsdp"]: "FULL_SHARD, ZeRO-3, fully_shard",
} | {
    placement_of(name, across=across): "states over all ranks, ZeRO++ hpZ, HFSDP"
    for name, row in STRATEGIES.items()
    for across in ACROSS[1:]
    if row.params.is_sharded
}
_PHASES = {Trigger.BEFORE_FORWARD: "forward", Trigger.BEFORE_BACKWARD: "backward", Trigger.AFTER_STEP: "update"}
# With more units than this, only the first ones and the last are drawn, so that a line fits into 80 columns.
_MAX_UNITS = 5
_MAX_RANKS = 8
_MAX_SLICES = 16
_OPERATION_WIDTH = 31
_NUMBER_WIDTH = 7


def picture_model() -> ModelSpec:
    """Return a model whose units have 4 Mi parameters each, 16 MiB in fp32, so that the numbers are easy to follow."""
    names = (ROOT, *(f"blocks.{index}" for index in range(3)))
    params = {name: TensorSpec(name=f"{name}.params", shape=(4 * 2**20,)) for name in names}
    units = tuple(UnitSpec(name=name, class_name="Picture", params=(param,)) for name, param in params.items())
    return ModelSpec(name="picture", units=units, call_order=names)


def explain(spec: ModelSpec, *, plan: Plan) -> list[str]:
    """Draw one step of a plan that has a mesh and the same placement for all units, 80 columns wide."""
    assert plan.mesh is not None
    placement = placement_of(plan.strategy, across=plan.across)
    step = snapshots_of(spec, plan=plan, num_ranks=plan.mesh.num_ranks)
    return [
        f"{plan.strategy}{plan.across_text}, also known as {OTHER_NAMES[placement]}",
        *in_words(placement, num_groups=plan.mesh.replicate),
        "",
        *_owners(placement, mesh=plan.mesh),
        "",
        *step_lines(step, spec=spec),
        "",
        *sum_lines(step),
    ]


def explain_as_data(spec: ModelSpec, *, plan: Plan) -> dict[str, Any]:
    """Return the same step for JSON: the rows of the program, and what a rank holds after each operation."""
    assert plan.mesh is not None
    step = snapshots_of(spec, plan=plan, num_ranks=plan.mesh.num_ranks)
    snapshots = iter(step.snapshots[1:])
    return {
        "model": spec.name,
        "strategy": plan.strategy,
        "across": plan.across,
        "ranks": plan.mesh.num_ranks,
        "replicate": plan.mesh.replicate,
        "prefetch": plan.prefetch,
        "units": [{"name": unit.name, "num_params": unit.num_params} for unit in spec.units],
        "buckets": [list(bucket.units) for bucket in step.program.buckets],
        "start": _snapshot_data(step.snapshots[0]),
        "rows": [
            {
                "trigger": row.trigger.value,
                "unit": row.unit,
                "call": row.call,
                "operations": [
                    {
                        "kind": operation.kind.value,
                        "subject": operation.subject,
                        "num_bytes": operation.num_bytes,
                        "stream": operation.kind.stream,
                        **_snapshot_data(next(snapshots)),
                    }
                    for operation in row.operations
                ],
            }
            for row in step.program.rows
        ],
        "peak_bytes": step.peak.held_bytes,
        "sent_bytes": {kind.value: step.sent_bytes(kind) for kind in WAITS.values()},
    }


def _snapshot_data(snapshot: Snapshot) -> dict[str, Any]:
    holds = {state: {name: held.value for name, held in snapshot.holds[state].items()} for state in STATES}
    return {"held_bytes": snapshot.held_bytes, **holds}


def in_words(placement: Placement, *, num_groups: int = 1) -> Iterator[str]:
    """Say what is sharded, then what happens to params, then to grads."""
    where = {state: getattr(placement, state) for state in STATES}
    sharded = [state for state in STATES if where[state].is_sharded]
    replicated = [state for state in STATES if state not in sharded]
    yield f"sharded: {', '.join(sharded) or 'nothing'}; replicated: {', '.join(replicated) or 'nothing'}"
    if placement.optim.is_sharded_across:
        crossing = [state for state in sharded if where[state].is_sharded_across]
        yield f"over all ranks, not over those of one group: {', '.join(crossing)}"
    if not placement.params.is_sharded:
        if placement.optim.is_sharded:
            yield "params: each rank updates its slice, then the slices are gathered"
        else:
            yield "params: every rank makes the same update, so nothing is ever gathered"
    elif placement.reshard_after_forward:
        yield "params: gathered before use and freed after it, in forward and again in backward"
    else:
        yield "params: gathered before forward, kept until backward is done with them"
    if placement.optim.is_sharded_across:
        yield f"        each rank updates its part of its slice, then the {num_groups} groups gather their slices"
    if placement.grads.is_sharded_across:
        yield f"grads:  reduce-scatter in each group, then over the {num_groups} groups: each rank keeps its part"
    elif placement.grads.is_sharded and num_groups > 1:
        yield f"grads:  reduce-scatter; then the {num_groups} groups add up their sums of each slice"
    elif placement.grads.is_sharded:
        yield "grads:  reduce-scatter; each rank keeps the sum of its own slice"
    else:
        yield "grads:  all-reduce; every rank keeps the whole sum"


def _owners(placement: Placement, *, mesh: Mesh) -> Iterator[str]:
    """Draw which rank has which slice of every unit when the optimizer runs."""
    num_ranks, num_parts = mesh.num_ranks, mesh.num_parts(placement.optim.axes - {"shard"})
    num_cells = mesh.shard * num_parts
    if num_ranks == 1:
        yield "1 rank: its slice of a unit is all of it, and nothing is sent"
    elif mesh.replicate > 1:
        groups = f"{num_ranks} ranks in {mesh.replicate} groups"
        yield f"{groups}; what each has of every unit, in {num_cells} slices, at the update:"
    else:
        yield f"{num_ranks} ranks; what each has of every unit, in {num_ranks} slices, at the update:"
    cells = _shortened(range(num_cells), most=_MAX_SLICES)
    width = max(len(cells), len("params")) + 2
    label_width = len(f"  rank {num_ranks - 1}") + 2
    yield " " * label_width + "".join(f"{state:{width}}" for state in STATES).rstrip()
    for rank in _shortened(range(num_ranks), most=_MAX_RANKS):
        if rank is None:
            yield "  ⋮"
            continue
        line = f"  rank {rank}".ljust(label_width)
        for state in STATES:
            owned = _owned_cells(getattr(placement, state), rank=rank, mesh=mesh, num_parts=num_parts)
            held = [Holding.WHOLE if cell in owned else Holding.NOTHING for cell in cells]
            drawn = ("…" if cell is None else GLYPHS[one] for cell, one in zip(cells, held, strict=True))
            line += "".join(drawn).ljust(width)
        yield line.rstrip()


def _owned_cells(where: Where, *, rank: int, mesh: Mesh, num_parts: int) -> range:
    """Return the cells, `num_parts` of each slice, that a rank has of what is sharded so."""
    group, index = mesh.coordinates(rank)
    if not where.is_sharded:
        return range(mesh.shard * num_parts)
    first = index * num_parts
    return range(first + group, first + group + 1) if where.is_sharded_across else range(first, first + num_parts)


def _shortened(numbers: range, *, most: int) -> list[int | None]:
    """Return all of them, or the first ones, None for a gap, and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [*numbers[: most // 2], None, numbers[-1]]


def step_lines(step: StepSnapshots, *, spec: ModelSpec) -> Iterator[str]:
    """Draw one line per operation: its name, what the rank holds after it, and how many bytes that is."""
    columns = _columns([unit.name for unit in spec.units])
    cell_width = 2 * len(columns) - 1 + max(2, len(columns[-1][1]))
    bar_width = WIDTH - _OPERATION_WIDTH - len(STATES) * cell_width - _NUMBER_WIDTH - len(" ") - len(" ◀")
    labels = {bucket.name: bucket_label(bucket.name, bucket.units) for bucket in step.program.buckets}
    peak = step.peak
    unit = _unit(peak.held_bytes)
    yield f"rank 0 in one step of {spec.name} ({len(spec.units)} units, {spec.num_params:,} parameters)"
    has_parts = Holding.PART in step.snapshots[0].holds["optim"].values()
    held = [held for held in GLYPHS if held is not Holding.PART]
    yield "  ".join(f"{GLYPHS[one]} {one.value}" for one in held)
    yield from [f"{GLYPHS[Holding.PART]} {Holding.PART.value}, one per group of ranks"] if has_parts else []
    yield from _heads([label for _, label in columns], cell_width=cell_width, unit=unit)
    phase = ""
    for snapshot in _with_gaps(step, shown={name for name, _ in columns}):
        if isinstance(snapshot, int):
            yield f"   ⋮ {snapshot} more operations, alike"
            continue
        if snapshot.row is not None and _PHASES.get(snapshot.row.trigger, phase) != phase:
            phase = _PHASES[snapshot.row.trigger]
            yield f"── {phase} ".ljust(WIDTH, "─")
        cells = "".join(_cells(snapshot.holds[state], columns=columns).ljust(cell_width) for state in STATES)
        number = f"{fixed(snapshot.held_bytes, unit=unit):>{_NUMBER_WIDTH}}"
        bar = _bar(snapshot.held_bytes / peak.held_bytes, width=bar_width)
        mark = " ◀" if snapshot is peak else ""
        yield f"{_text(snapshot, labels=labels):{_OPERATION_WIDTH}}{cells}{number} {bar}{mark}".rstrip()


def _heads(labels: list[str], *, cell_width: int, unit: UnitOfMeasure) -> Iterator[str]:
    states = "".join(f"{state:{cell_width}}" for state in STATES)
    yield f"{'after this operation':{_OPERATION_WIDTH}}{states}{unit.name:>{_NUMBER_WIDTH}}"
    units = f"{' '.join(labels):{cell_width}}" * len(STATES)
    yield f"{'it holds, of root and blocks':{_OPERATION_WIDTH}}{units}".rstrip()


def _with_gaps(step: StepSnapshots, *, shown: set[str | None]) -> Iterator[Snapshot | int]:
    """Yield the snapshots to draw, and between them the number of those left out."""
    buckets = {bucket.name: bucket for bucket in step.program.buckets}
    peak = step.peak
    num_hidden = 0
    for snapshot in step.snapshots:
        if snapshot.operation is not None and snapshot.operation.kind is Kind.TAKE_GRADS:
            # A copy into the buffer that is reduced next; it does not change what a rank holds.
            continue
        if snapshot is peak or _is_shown(snapshot, shown=shown, buckets=buckets):
            if num_hidden:
                yield num_hidden
            num_hidden = 0
            yield snapshot
        else:
            num_hidden += 1
    if num_hidden:
        yield num_hidden


def _is_shown(snapshot: Snapshot, *, shown: set[str | None], buckets: Mapping[str, Bucket]) -> bool:
    """Return whether the row's unit is drawn; in a long row, the operation's subject must be drawn, too.

    Of the pieces in which a unit is reduced, the first and the last are.
    """
    if snapshot.row is None or snapshot.operation is None:
        return True
    if snapshot.row.unit not in shown:
        return False
    subject = snapshot.operation.subject
    bucket = buckets.get(subject)
    if bucket is not None and bucket.piece and not bucket.is_last:
        return False
    units = (subject,) if bucket is None else bucket.units
    return len(snapshot.row.operations) <= _MAX_UNITS + 1 or not shown.isdisjoint(units)


def _columns(names: list[str]) -> list[tuple[str | None, str]]:
    """Return (unit, short label) of the units that are drawn; (None, "…") stands for the others."""
    endings = [name.rpartition(".")[2] for name in names]
    labels = endings if len(set(endings)) == len(endings) else [str(number - 1) for number in range(len(names))]
    pairs = [(name, "r" if name == ROOT else label) for name, label in zip(names, labels, strict=True)]
    if len(pairs) <= _MAX_UNITS:
        return list(pairs)
    return [*pairs[: _MAX_UNITS - 2], (None, "…"), pairs[-1]]


def _text(snapshot: Snapshot, *, labels: Mapping[str, str]) -> str:
    """Return the operation as text; all operations but computation are indented."""
    if snapshot.operation is None:
        return "(the step begins)"
    kind, subject = snapshot.operation.kind, snapshot.operation.subject
    if kind in ON_BUCKETS:
        subject = labels[subject]
    indent = " " if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE) else "   "
    text = f"{indent}{kind.value} {subject}"
    return text if len(text) < _OPERATION_WIDTH else text[: _OPERATION_WIDTH - 2] + "…"


def _cells(held: Mapping[str, Holding], *, columns: list[tuple[str | None, str]]) -> str:
    return " ".join("…" if name is None else GLYPHS[held[name]] for name, _ in columns)


def _bar(fraction: float, *, width: int) -> str:
    """Draw a bar in eighths of a column, so that small changes show."""
    eighths = round(fraction * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _unit(num_bytes: float) -> UnitOfMeasure:
    """Return a unit in which one decimal place is enough."""
    return byte_unit(num_bytes, at_least=10, among=(KIB, MIB, GIB, TIB))


def sum_lines(step: StepSnapshots) -> Iterator[str]:
    peak = step.peak.held_bytes
    unit = _unit(peak)
    start = fixed_text(step.snapshots[0].held_bytes, unit=unit)
    yield f"held: {start} between steps, when grads are dropped; {fixed(peak, unit=unit)} at the peak (◀)"
    gathers = step.sent_bytes(Kind.GATHER) + step.sent_bytes(Kind.GATHER_SLICE)
    reduces = step.sent_bytes(Kind.REDUCE) + step.sent_bytes(Kind.REDUCE_SLICE)
    owned = step.sent_bytes(Kind.TO_OWNERS) + step.sent_bytes(Kind.FROM_OWNERS)
    total = gathers + reduces + owned
    unit = _unit(total)
    sent, *shown = fixed_text(total, unit=unit), *(fixed(part, unit=unit) for part in (gathers, reduces, owned))
    moved = f", to and from owners {shown[2]}" if owned else ""
    yield f"sent: {sent} per step: gathers {shown[0]}, reduces {shown[1]}{moved} (see explain ring)"
    yield "fp32 params, grads and AdamW's two moments are counted; activations are not."
