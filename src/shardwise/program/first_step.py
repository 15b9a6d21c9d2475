"""The first step of our engine, which has yet to learn in which order units are called (engine/core/learn.py)."""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.plan import Plan
from shardwise.program.operations import Kind, Operation, Row, StepProgram, Trigger
from shardwise.spec import ROOT, UNANNOUNCED, ModelSpec


def first_step(program: StepProgram, *, spec: ModelSpec, plan: Plan) -> StepProgram:
    """The program of a step as it goes where nothing is known yet.

    In forward each unit is gathered when it is called, not ahead, and freed after it unless it stays by its placement.
    What the program expects backward to find whole is gathered again when that begins. The rest is as ever.
    """
    gathers = {op.subject: op for row in program.rows[:-1] for op in row.operations if op.kind is Kind.GATHER}
    begin = program.first_of_backward
    placements = plan.placements(unit.name for unit in spec.units)
    stay = {
        unit.name
        for unit in spec.units
        if unit.name == ROOT
        or unit.backward == UNANNOUNCED
        or not placements[unit.name].reshard_after_forward
        or unit.name not in gathers
    }
    forward = [
        replace(row, operations=tuple(_on_demand(row, gather=gathers.get(row.unit), frees=row.unit not in stay)))
        for row in program.rows[:begin]
    ]
    first, *later = program.rows[begin:]
    whole = program.whole_after_forward()
    again = tuple(gather for unit, gather in gathers.items() if unit in whole and unit not in stay)
    rows = (*forward, replace(first, operations=(*again, *first.operations)), *later)
    return replace(program, rows=rows)


def _on_demand(row: Row, *, gather: Operation | None, frees: bool) -> Iterator[Operation]:
    if row.trigger is Trigger.AFTER_FORWARD:
        if frees:
            yield Operation(kind=Kind.FREE, subject=row.unit)
        return
    if gather is not None:
        yield from (gather, Operation(kind=Kind.WAIT_GATHER, subject=row.unit))
    yield from (op for op in row.operations if op.kind not in (Kind.GATHER, Kind.WAIT_GATHER))
