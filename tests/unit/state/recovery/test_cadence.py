"""k: the cost of snapshots stays at 1% of the time, and a snapshot is whole before the next one begins."""

import pytest

from shardwise.state.recovery.cadence import Cadence


def measured(*, step_seconds: float, cost_seconds: float, copy_seconds: float) -> Cadence:
    cadence = Cadence()
    for number in range(5):
        cadence.step_ended(number * step_seconds)
    cadence.took(cost_seconds=cost_seconds, copy_seconds=copy_seconds)
    return cadence


@pytest.mark.parametrize(
    ("step_seconds", "cost_seconds", "copy_seconds", "every"),
    [
        (1.0, 0.0, 0.0, 1),
        (1.0, 0.01, 0.5, 1),
        (1.0, 0.04, 0.5, 4),
        # On a GPU almost nothing is taken from training, but the copy takes three steps.
        (0.098, 0.001, 0.29, 3),
        (0.1, 0.25, 0.3, 250),
    ],
)
def test_k_follows_from_the_cost_and_from_the_time_of_a_copy(
    step_seconds: float, cost_seconds: float, copy_seconds: float, every: int
) -> None:
    cadence = measured(step_seconds=step_seconds, cost_seconds=cost_seconds, copy_seconds=copy_seconds)
    assert cadence.every == every
    assert cadence.cost_seconds / (cadence.every * cadence.step_seconds) <= 0.0101


def test_nothing_is_assumed_before_a_step_is_measured() -> None:
    cadence = Cadence()
    cadence.step_ended(5.0)
    assert (cadence.step_seconds, cadence.every) == (0.0, 3)


def test_time_that_a_snapshot_took_is_no_time_of_a_step() -> None:
    cadence = Cadence()
    for number in range(4):
        cadence.stalled(0.5 if number == 2 else 0.0)
        cadence.step_ended(number + (0.5 if number >= 2 else 0.0))
    assert cadence.step_seconds == pytest.approx(1.0)
