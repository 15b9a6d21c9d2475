"""Modules that nobody thought of, with a placement for each unit, train as in one process."""

from functools import partial

import pytest
from cases import adamw
from drawn import Drawn, modules
from generated import loss_of, make
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from training import Case, assert_equal, on_ranks, one_process
from whole import whole

from shardwise.plan.placement import STRATEGIES


@pytest.mark.parametrize("num_examples", [8, *whole(30)])
def test_any_module_under_any_placements_is_bit_equal_to_one_process(num_examples: int) -> None:
    drawn = given(module=modules, strategy=st.sampled_from(list(STRATEGIES)))
    settings(max_examples=num_examples)(drawn(trains_as_in_one_process))()


def trains_as_in_one_process(module: Drawn, strategy: str) -> None:
    case = Case(make=partial(make, module.layers), optimizer=adamw, loss=loss_of, num_steps=4)
    results = run_ranks(on_ranks, num_ranks=2, args=(case, module.plan(strategy), True))
    assert_equal(results, one_process(case, num_ranks=2))
