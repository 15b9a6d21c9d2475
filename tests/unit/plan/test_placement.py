import ast
import itertools
from pathlib import Path

import pytest

import shardwise
from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.plan.placement import (
    ACROSS,
    REPLICATED,
    SHARDED,
    SHARDED_TWICE,
    STRATEGIES,
    Placement,
    Where,
    placement_of,
    strategy_of,
)


def test_the_table_holds_the_five_strategies_simplest_first() -> None:
    rows = {name: (row.params, row.grads, row.optim, row.reshard_after_forward) for name, row in STRATEGIES.items()}
    r, s = REPLICATED, SHARDED
    assert list(rows.items()) == [
        ("ddp", (r, r, r, False)),
        ("zero1", (r, r, s, False)),
        ("zero2", (r, s, s, False)),
        ("shard_grad_op", (s, s, s, False)),
        ("fsdp", (s, s, s, True)),
    ]


def test_exactly_the_placements_that_keep_the_invariant_can_be_made() -> None:
    made = set()
    for params, grads, optim in itertools.product(Where, repeat=3):
        for reshard in (False, True):
            try:
                made.add(Placement(params=params, grads=grads, optim=optim, reshard_after_forward=reshard))
            except InvalidPlan as error:
                assert "\n" not in str(error)
    assert made == {placement_of(name, across=across) for name in STRATEGIES for across in ACROSS}


def test_a_strategy_across_shards_more_of_what_is_sharded_and_never_parameters() -> None:
    rows = {
        (name, across): (row.grads, row.optim)
        for name in STRATEGIES
        for across in ACROSS
        for row in [placement_of(name, across=across)]
        if row != STRATEGIES[name]
    }
    s, t = SHARDED, SHARDED_TWICE
    assert rows == {
        (name, across): where
        for name in ("shard_grad_op", "fsdp")
        for across, where in (("zero1", (s, t)), ("zero2", (t, t)))
    }
    assert all(placement_of(name, across=across).params is SHARDED for name, across in rows)
    assert all(strategy_of(placement_of(name, across=across)) == name for name, across in rows)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        STRATEGIES["mine"] = STRATEGIES["ddp"]  # type: ignore[index]


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean zero2 or zero1"):
        placement_of("zero4")


@pytest.mark.parametrize("wrong", ["sharded", None, True])
def test_a_placement_takes_nothing_but_where(wrong: object) -> None:
    with pytest.raises(InvalidPlan, match="optim = "):
        Placement(params=REPLICATED, grads=REPLICATED, optim=wrong)  # type: ignore[arg-type]


def test_no_code_asks_for_a_strategy_by_name() -> None:
    """A table may have strategies as keys; a comparison with a name is a branch."""
    source = Path(shardwise.__file__).parent
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in STRATEGIES):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare | ast.MatchValue):
                names = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                asked = [name for name in names if isinstance(name, str) and name in STRATEGIES]
                assert not asked, f"{path.relative_to(source)}:{node.lineno} asks for {asked}: ask the placement"
