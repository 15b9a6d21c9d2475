import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import InvalidPlan
from shardwise.plan.patterns import Cut, UnitPolicy

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
paths = st.lists(names, min_size=1, max_size=3).map(".".join)
policies = st.one_of(
    st.builds(UnitPolicy, cut=st.sampled_from([Cut.AUTO, Cut.LEAVES, Cut.NOTHING])),
    st.builds(UnitPolicy, cut=st.just(Cut.CLASSES), class_names=st.lists(names, min_size=1).map(tuple)),
    st.builds(UnitPolicy, cut=st.just(Cut.MIN_PARAMS), min_params=st.integers(1, 10**15)),
).flatmap(
    lambda policy: st.lists(paths, max_size=3).map(
        lambda modules: UnitPolicy(
            cut=policy.cut,
            class_names=policy.class_names,
            min_params=policy.min_params,
            modules=tuple(modules),
        )
    )
)


@given(policies)
def test_every_policy_is_spelled_and_parsed_back(policy: UnitPolicy) -> None:
    assert UnitPolicy.parse(str(policy)) == policy


def test_modules_may_be_named_after_any_rule() -> None:
    policy = UnitPolicy.parse("class:Block, Bottleneck+head + embed")
    assert policy.class_names == ("Block", "Bottleneck")
    assert policy.modules == ("head", "embed")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "blocks:1",
        "class",
        "class:",
        "class:a b",
        "auto:1",
        "min-params:",
        "min-params:-1",
        "min-params:1e6",
        "auto +",
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        UnitPolicy.parse(text)
    assert str(caught.value).startswith("units = ")
    assert "\n" not in str(caught.value)
