"""Where a step stands: what may happen next, and in which line everything else ends."""

import pytest

from shardwise.base.errors import ShardwiseError
from shardwise.engine.core.step_state import Move, Phase, StepState


def after(*moves: Move) -> StepState:
    state = StepState()
    for move in moves:
        state = state.after(move)
    return state


def test_a_step_begins_and_ends_between_steps() -> None:
    assert after(Move.FORWARD, Move.BACKWARD, Move.BACKWARD_ENDS, Move.UPDATE) == StepState()


def test_a_backward_goes_back_through_all_forwards_since_the_last() -> None:
    state = after(Move.FORWARD, Move.FORWARD, Move.BACKWARD)
    assert (state.phase, state.forwards) == (Phase.BACKWARD, 2)
    assert state.is_in_step
    ended = state.after(Move.BACKWARD_ENDS)
    assert (ended.phase, ended.forwards) == (Phase.GRADIENTS, 0)
    assert not ended.is_in_step


def test_a_graph_that_is_retained_may_be_gone_back_through_again() -> None:
    again = after(Move.FORWARD, Move.BACKWARD, Move.BACKWARD_ENDS, Move.BACKWARD)
    assert again.phase is Phase.BACKWARD
    # Without a forward since, a backward that raised leads back to where it began.
    assert again.after(Move.DROP).phase is Phase.GRADIENTS


def test_after_a_backward_that_raised_was_dropped_its_forward_is_still_there() -> None:
    assert after(Move.FORWARD, Move.BACKWARD, Move.DROP) == StepState(phase=Phase.FORWARD, forwards=1)


def test_a_forward_from_before_an_update_keeps_its_backward() -> None:
    assert after(Move.FORWARD, Move.UPDATE) == StepState(phase=Phase.FORWARD, forwards=1)


@pytest.mark.parametrize(
    ("moves", "line"),
    [
        ((Move.BACKWARD,), "a backward without a forward of the model since the last step"),
        (
            (Move.FORWARD, Move.BACKWARD, Move.BACKWARD_ENDS, Move.UPDATE, Move.BACKWARD),
            "a backward without a forward of the model since the last step",
        ),
        ((Move.FORWARD, Move.BACKWARD, Move.FORWARD), "a backward failed in the middle of an accumulation"),
        ((Move.FORWARD, Move.BACKWARD, Move.UPDATE), "a step right after a backward that raised"),
    ],
)
def test_what_is_not_legal_ends_in_one_line(moves: tuple[Move, ...], line: str) -> None:
    with pytest.raises(ShardwiseError) as error:
        after(*moves)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
