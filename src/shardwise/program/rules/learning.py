"""Our engine's rules of a first step, in which the order of the units is not known yet.

In forward each unit is gathered when it is called, not ahead, and freed after it unless its placement keeps it. Then
all ranks catch up with the program that they have learned, and backward and update follow that. The engine runs these
rules event by event, while the model calls its units; the planner builds the same step from the order that it knows.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from shardwise.program.operations import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.rules.context import Rules, StepContext, StepEvent
from shardwise.program.spec import ROOT, UNANNOUNCED


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstState:
    """`gathered`: the sharded units that are gathered on this rank."""

    gathered: frozenset[str] = frozenset()


Outcome = tuple[FirstState, tuple[Operation, ...]]


def before_forward(state: FirstState, event: StepEvent, context: StepContext) -> Outcome:
    """Gather the unit that is called, and wait for it."""
    unit = event.unit
    operations = context.at_start if unit == ROOT else ()
    if context.sharded(unit) and unit not in state.gathered:
        state = replace(state, gathered=state.gathered | {unit})
        operations += on_demand(unit, context)
    return state, (*operations, Operation(kind=Kind.FORWARD, subject=unit))


def after_forward(state: FirstState, event: StepEvent, context: StepContext) -> Outcome:
    """Free the unit, unless it stays gathered until backward."""
    unit = event.unit
    stays = unit == ROOT or context.backward.get(unit) == UNANNOUNCED
    if stays or unit not in state.gathered or not context.placements[unit].reshard_after_forward:
        return state, ()
    state = replace(state, gathered=state.gathered - {unit})
    return state, (Operation(kind=Kind.FREE, subject=unit),)


LEARNING = Rules(
    name="learning",
    by_trigger={Trigger.BEFORE_FORWARD: before_forward, Trigger.AFTER_FORWARD: after_forward},
    first_state=lambda context: FirstState(),
)


def on_demand(unit: str, context: StepContext) -> tuple[Operation, ...]:
    """Return the operations that gather a unit that is needed now."""
    gather = context.gather(unit)
    return (gather,) if context.is_at_once(unit) else (gather, Operation(kind=Kind.WAIT_GATHER, subject=unit))


def catch_up(
    program: StepProgram, *, gathered: AbstractSet[str], gathered_by_all: AbstractSet[str], context: StepContext
) -> Row:
    """Return the row that brings a rank to the program's state after forward, whatever it has called.

    gathered          the sharded units that are gathered on this rank; `gathered_by_all`: on all ranks
    """
    kept = program.gathered_after_forward()
    units = [unit for unit in context.placements if context.sharded(unit)]
    frees = [Operation(kind=Kind.FREE, subject=unit) for unit in units if unit in gathered and unit not in kept]
    gathers = [context.gather(unit) for unit in units if unit in kept and unit not in gathered_by_all]
    return Row(trigger=Trigger.CAUGHT_UP, unit=ROOT, call=0, operations=(*frees, *gathers))
