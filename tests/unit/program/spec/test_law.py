"""Laws pass through what was seen, or are not laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.program.spec.step import Law, Line, fit

terms = st.tuples(*[st.integers(0, 10**9)] * 6)


def values(law: Law, *, batches: tuple[int, ...], lengths: tuple[int, ...]) -> dict[tuple[int, int], int]:
    return {(batch, length): law.at(batch=batch, seq=length) for length in lengths for batch in batches}


@given(terms)
def test_a_law_is_found_again_from_two_batches_and_three_lengths(found: tuple[int, ...]) -> None:
    law = Law(found)  # type: ignore[arg-type]
    assert fit(values(law, batches=(2, 3), lengths=(128, 64, 32))) == law


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_with_one_length_all_of_it_is_in_the_constants(const: int, per_sample: int) -> None:
    law = fit({(2, 0): const + 2 * per_sample, (3, 0): const + 3 * per_sample})
    assert law is not None
    assert law.line() == law.line(7) == Line(const, per_sample)


@pytest.mark.parametrize("power", [2, 3])
def test_what_grows_faster_than_the_batch_is_no_law(power: int) -> None:
    assert fit({(batch, 0): 4 * batch**power for batch in (2, 3)}) is None


def test_a_third_batch_is_checked() -> None:
    assert fit({(2, 0): 20, (3, 0): 30, (5, 0): 50}) is not None
    assert fit({(2, 0): 20, (3, 0): 30, (5, 0): 51}) is None


def test_half_a_byte_is_no_law() -> None:
    assert fit({(2, 0): 2, (4, 0): 3}) is None
