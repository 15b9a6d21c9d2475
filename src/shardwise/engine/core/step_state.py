"""Where a step stands, and what may come next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from shardwise.base.errors import ShardwiseError
from shardwise.engine.core import step_errors
from shardwise.engine.hooks.step_hooks import recomputing


class Phase(Enum):
    """Of a step. A forward without gradients is no part of one, and comes in any phase.

    BETWEEN     no forward since the last update
    FORWARD     forwards whose backward has not begun
    BACKWARD    a backward runs, or has raised
    GRADIENTS   a backward is over; the graph of its forward may be there for another one
    """

    BETWEEN, FORWARD, BACKWARD, GRADIENTS = range(4)


class Move(Enum):
    """What happens to a step. DROP: what a backward that raised has left is dropped."""

    FORWARD, BACKWARD, BACKWARD_ENDS, DROP, UPDATE = range(5)


# Phase → what may happen in it, and the phase after it. DROP leads back to where the backward began.
_LEGAL: Mapping[Phase, Mapping[Move, Phase]] = {
    Phase.BETWEEN: {Move.FORWARD: Phase.FORWARD, Move.UPDATE: Phase.BETWEEN},
    # An update leaves the forward before it: torch refuses its backward if that needs what was updated.
    Phase.FORWARD: {Move.FORWARD: Phase.FORWARD, Move.BACKWARD: Phase.BACKWARD, Move.UPDATE: Phase.FORWARD},
    Phase.BACKWARD: {Move.BACKWARD_ENDS: Phase.GRADIENTS, Move.DROP: Phase.FORWARD},
    Phase.GRADIENTS: {Move.FORWARD: Phase.FORWARD, Move.BACKWARD: Phase.BACKWARD, Move.UPDATE: Phase.BETWEEN},
}
_REFUSED: Mapping[tuple[Phase, Move], Callable[[], ShardwiseError]] = {
    (Phase.BETWEEN, Move.BACKWARD): step_errors.backward_without_forward,
    (Phase.BACKWARD, Move.FORWARD): step_errors.accumulation_failed,
    (Phase.BACKWARD, Move.UPDATE): lambda: (
        step_errors.step_inside_backward() if recomputing() else step_errors.backward_raised()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """`forwards`: how many there were since the last backward, which goes back through all of them."""

    phase: Phase = Phase.BETWEEN
    forwards: int = 0

    @property
    def is_in_step(self) -> bool:
        """Return whether a forward has run whose backward is not over."""
        return self.phase is Phase.BACKWARD or self.forwards > 0

    def after(self, move: Move) -> "StepState":
        """Return the state after a move; raise if it is not legal."""
        if move not in _LEGAL[self.phase]:
            raise _REFUSED[self.phase, move]()
        phase, forwards = _LEGAL[self.phase][move], self.forwards
        if move is Move.FORWARD:
            forwards += 1
        elif move is Move.BACKWARD_ENDS:
            forwards = 0
        elif move is Move.DROP and not forwards:
            phase = Phase.GRADIENTS
        return StepState(phase=phase, forwards=forwards)
