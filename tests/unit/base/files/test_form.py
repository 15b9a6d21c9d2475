"""The validator of TOML and JSON: each form accepts what it says, converts it, and names what is wrong by its path."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import InvalidPlan
from shardwise.base.files.form import (
    Form,
    WrongForm,
    each,
    number,
    one_of,
    optional,
    pair,
    record,
    refusing,
    row,
    string,
    switch,
    table,
    text,
    whole,
)

CAR = record(
    may_lack=("owner",),
    name=text,
    wheels=each(record(size=whole(least=1), worn=switch), least=1),
    speeds=row(number(), optional(number())),
    parts=table(string, needs=["engine"]),
    owner=one_of(["me", "you"]),
)
GOOD: dict[str, Any] = {
    "name": "a",
    "wheels": [{"size": 3, "worn": False}],
    "speeds": [1, None],
    "parts": {"engine": ""},
}


def test_a_form_gives_values_in_their_types() -> None:
    assert CAR(GOOD, "") == {
        "name": "a",
        "wheels": ({"size": 3, "worn": False},),
        "speeds": (1.0, None),
        "parts": {"engine": ""},
    }
    assert pair(least=0)([1, 2.5], "") == (1.0, 2.5)
    assert isinstance(number()(1, ""), float)
    assert one_of(["a"]).then(lambda value, path: f"{path}/{value}")("a", "x") == "x/a"


@pytest.mark.parametrize(
    ("change", "message", "advice"),
    [
        ({"name": ""}, "name is '', not a text", "name = '': must be a text"),
        ({"name": "a\nb"}, "name is 'a\\nb', not a text", "name = 'a\\nb': must be a text"),
        ({"wheels": []}, "wheels is [], not a list of at least 1", ""),
        ({"wheels": {}}, "wheels is {}, not a list of at least 1", ""),
        ({"wheels": [{"size": 0, "worn": True}]}, "wheels[0].size is 0, not a whole number of at least 1", ""),
        ({"wheels": [{"size": True, "worn": True}]}, "wheels[0].size is True, not a whole number of at least 1", ""),
        ({"wheels": [{"size": 2**63, "worn": True}]}, "wheels[0].size is 9223372036854775808, not", ""),
        ({"wheels": [{"size": 1, "worn": 1}]}, "wheels[0].worn is 1, not true or false", ""),
        ({"wheels": [{"size": 1}]}, "wheels[0].worn is missing", "wheels[0].worn is missing"),
        ({"speeds": [1]}, "speeds is [1], not a list of 2", ""),
        ({"speeds": [float("nan"), 1]}, "speeds[0] is nan, not a number", ""),
        ({"speeds": [1, "fast"]}, "speeds[1] is 'fast', not a number", "speeds[1] = 'fast': must be a number"),
        ({"parts": {}}, "parts.engine is missing", ""),
        ({"parts": {"engine": "", "a\nb": 3}}, "parts.'a\\nb' is 3, not a string", ""),
        ({"owner": "him"}, "owner is 'him', not one of me, you", "owner = 'him': must be one of me, you"),
        ({"ownr": "me"}, "unknown key 'ownr'; did you mean owner?", ""),
    ],
)
def test_what_has_another_form_is_one_line_with_its_path(change: dict[str, Any], message: str, advice: str) -> None:
    with pytest.raises(WrongForm) as caught:
        CAR({**GOOD, **change}, "")
    assert str(caught.value).startswith(message)
    assert caught.value.advice.startswith(advice)
    with pytest.raises(InvalidPlan) as refused, refusing(InvalidPlan):
        CAR({**GOOD, **change}, "")
    assert str(refused.value) == caught.value.advice


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (whole(), "a whole number"),
        (number(above=0, most=1e3), "a number above 0 and at most 1,000.0"),
        (pair(least=0, below=1), "two numbers of at least 0 and below 1"),
        (each(string, least=2), "a list of at least 2"),
        (optional(one_of(["a", "b"])), "one of a, b"),
    ],
)
def test_the_words_of_a_form_say_its_limits(form: Form, words: str) -> None:
    assert form.words == words


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([None, *GOOD]))
def test_any_value_is_accepted_or_refused_in_one_line(value: Any, name: str | None) -> None:
    try:
        CAR(value if name is None else {**GOOD, name: value}, "")
    except WrongForm as error:
        assert len(str(error).splitlines()) == 1
        assert len(error.advice.splitlines()) == 1
