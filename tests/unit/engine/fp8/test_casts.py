"""Casts to fp8: scales are the largest powers of two that fit, and nothing else is lost than digits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.engine.fp8.casts import E4M3, E5M2, cast, reciprocal, scale_of

DTYPES = [E4M3, E5M2]
normal = st.floats(min_value=2.0**-100, max_value=2.0**100, width=32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(largest=normal)
def test_a_scale_is_the_largest_power_of_two_that_lets_the_largest_value_fit(
    dtype: torch.dtype, largest: float
) -> None:
    scale, inverse = (one.item() for one in scale_of(torch.tensor(largest), dtype=dtype))
    most = torch.finfo(dtype).max
    assert largest * scale <= most < 2 * largest * scale
    assert scale * inverse == 1.0
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    zeros = cast(torch.zeros(16, 16), dtype=dtype)
    assert not zeros.values.float().any()
    assert zeros.inverse.isfinite()
    for value in (torch.inf, -torch.inf, torch.nan):
        spoiled = torch.ones(16, 16)
        spoiled[3, 4] = value
        found = cast(spoiled, dtype=dtype)
        assert (found.values.float() * found.inverse).isnan().all()
        by_rows = cast(spoiled, dtype=dtype, dim=1)
        assert (by_rows.values.float() * by_rows.inverse).isnan().all(dim=1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize(("dtype", "digits"), [(E4M3, 4), (E5M2, 3)])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_cast_keeps_the_digits_of_its_dtype(dtype: torch.dtype, digits: int, dim: int | None) -> None:
    torch.manual_seed(0)
    # Within the range of normal numbers below the largest value.
    tensor = (torch.rand(64, 32) + 0.5) * torch.exp2(torch.randint(-3, 4, (64, 32))) * 1e-3
    found = cast(tensor, dtype=dtype, dim=dim)
    error = (found.values.float() * found.inverse - tensor).abs() / tensor
    assert error.max() <= 2.0**-digits


def test_very_small_values_are_scaled_as_far_as_the_inverse_is_a_normal_number() -> None:
    scale, inverse = scale_of(torch.tensor(1e-44), dtype=E4M3)
    assert scale * inverse == 1.0
    assert inverse >= torch.finfo(torch.float32).tiny


@given(exponent=st.integers(-125, 125))
def test_a_reciprocal_is_exact(exponent: int) -> None:
    power: Tensor = torch.tensor(2.0**exponent)
    assert reciprocal(power) * power == 1.0
