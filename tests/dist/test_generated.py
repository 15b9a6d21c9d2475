"""Modules that nobody thought of, with a placement for each unit, train as in one process."""

from fnmatch import fnmatchcase
from functools import partial

from cases import adamw
from generated import Layer, loss_of, make
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from training import Case, assert_equal, on_ranks, one_process

from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.units import unit_modules

leaves = st.builds(
    Layer,
    hidden=st.sampled_from([1, 2, 3, 7, 33]),
    norm=st.booleans(),
    residual=st.booleans(),
    again=st.booleans(),
)
layers = st.builds(
    Layer,
    hidden=st.sampled_from([1, 3, 40]),
    norm=st.booleans(),
    residual=st.booleans(),
    inside=st.lists(leaves, max_size=2).map(tuple),
    again=st.booleans(),
    branch=st.booleans(),
    skip=st.booleans(),
    frozen=st.sampled_from(["", "", "up", "down", "up down"]),
)


@given(
    layers=st.lists(layers, min_size=1, max_size=4).map(tuple),
    strategy=st.sampled_from(list(STRATEGIES)),
    overrides=st.dictionaries(
        st.sampled_from(["(root)", "blocks.0*", "*.inside.*", "blocks.?"]), st.sampled_from(list(STRATEGIES))
    ),
    units=st.sampled_from(["auto", "class:Block", "leaf", "none", "min-params:20"]),
    prefetch=st.integers(0, 3),
    reduces_in_flight=st.integers(1, 2),
    bucket_bytes=st.sampled_from([1, 500, 10**6]),
    recompute=st.sampled_from(["none", "none", "full", "selective"]),
)
@settings(max_examples=20)
def test_any_module_under_any_placements_is_bit_equal_to_one_process(
    layers: tuple[Layer, ...],
    strategy: str,
    overrides: dict[str, str],
    units: str,
    prefetch: int,
    reduces_in_flight: int,
    bucket_bytes: int,
    recompute: str,
) -> None:
    names = list(unit_modules(make(layers)[0], policy=units))
    plan = Plan(
        strategy=strategy,
        overrides={p: s for p, s in overrides.items() if any(fnmatchcase(name, p) for name in names)},
        units=units,
        prefetch=prefetch,
        reduces_in_flight=reduces_in_flight,
        bucket_bytes=bucket_bytes,
        recompute=recompute,
        # The same block may be called more often than in the first step, by one rank alone.
        dynamic=any(layer.branch for layer in layers),
    )
    case = Case(make=partial(make, layers), optimizer=adamw, loss=loss_of, num_steps=4)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))
