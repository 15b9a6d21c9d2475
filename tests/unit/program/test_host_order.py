"""The order of what passes between device and host memory, and when units are stepped."""

from collections import deque

import pytest

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.program.rules.context import has_states_on_host, is_in_backward, overdue, saved_before, takes_grads


@pytest.mark.parametrize(("most", "arrived"), [(0, [1, 2, 3]), (2, [1]), (3, [])])
def test_what_left_first_must_arrive_before_more_leaves(most: int, arrived: list[int]) -> None:
    under_way = deque([1, 2, 3])
    assert list(overdue(under_way, most=most)) == arrived
    assert len(under_way) == 3 - len(arrived)


def test_activations_are_away_while_the_next_unit_runs() -> None:
    assert [saved_before(unit, saving=["a", "b", "c"]) for unit in ("a", "b", "c", "root")] == [None, "a", "b", None]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("fsdp", {}, (False, False, False)),
        ("fsdp", {"offload_states": True}, (True, False, False)),
        ("fsdp", {"offload_states": True, "offload_update": "host"}, (True, False, True)),
        ("zero2", {"update": "backward"}, (False, True, True)),
        # What every rank holds whole stays on the device until the step.
        ("zero1", {"update": "backward"}, (False, False, False)),
    ],
)
def test_states_updates_and_gradients_of_a_unit(strategy: str, options: dict, expected: tuple[bool, ...]) -> None:  # type: ignore[type-arg]
    plan, placement = Plan(strategy=strategy, **options), STRATEGIES[strategy]
    found = (
        has_states_on_host("a", plan=plan, placement=placement),
        is_in_backward(plan, placement),
        takes_grads("a", plan=plan, placement=placement),
    )
    assert found == expected
