"""Rows outside a step's program: units that are gathered for an evaluation, for another rank, or after an edit."""

from shardwise.program.operations import Kind, Operation, Row, Trigger
from shardwise.program.rules.context import StepContext
from shardwise.program.rules.learning import on_demand
from shardwise.program.spec import ROOT


def demanded(unit: str, context: StepContext) -> Row:
    """Return the row for a unit that a forward outside a step needs now."""
    return Row(trigger=Trigger.DEMANDED, unit=unit, call=0, operations=on_demand(unit, context))


def agreed(unit: str, context: StepContext) -> Row:
    """Return the row for a unit that one rank needs and all ranks have agreed to gather."""
    return Row(trigger=Trigger.AGREED, unit=unit, call=0, operations=on_demand(unit, context))


def broadcast(context: StepContext) -> Row:
    """Return the row that takes the model's buffers from the rank whose buffers count."""
    return Row(trigger=Trigger.DEMANDED, unit=ROOT, call=0, operations=context.broadcasts)


def rescaled(context: StepContext) -> Row:
    """Return the row before forwards outside a step, if weights are gathered in fp8."""
    return Row(trigger=Trigger.DEMANDED, unit=ROOT, call=0, operations=context.scales)


def released(unit: str) -> Row:
    """Return the row for a unit that was gathered on demand and is no longer needed."""
    return Row(trigger=Trigger.RELEASED, unit=unit, call=0, operations=(Operation(kind=Kind.FREE, subject=unit),))


def edited(context: StepContext) -> Row:
    """Return the row after owned slices got new values: free gathered units, gather replicated ones from the slices."""
    operations: tuple[Operation, ...] = ()
    for unit, placement in context.placements.items():
        if placement.optim.is_sharded_across and context.gather_bytes[unit]:
            gather = context.gather_slice(unit, num_bytes=context.gather_bytes[unit])
            operations += (gather, Operation(kind=Kind.WAIT_GATHER_SLICE, subject=unit))
        if placement.params.is_sharded:
            operations += (Operation(kind=Kind.FREE, subject=unit),)
        elif placement.optim.is_sharded and context.gather_bytes[unit]:
            operations += on_demand(unit, context)
    return Row(trigger=Trigger.EDITED, unit=ROOT, call=0, operations=operations)
