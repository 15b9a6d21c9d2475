"""Casts to fp8: a scale, the scaled values in 8 bits, and the scale's inverse.

A scale is a power of two, so that scaling and its inverse are exact: the only rounding is that to 8 bits, and every
device and every compiler rounds alike. It is the largest one by which the largest value still fits: 448 = 1.75 · 2⁸ in
e4m3 and 57344 = 1.75 · 2¹⁵ in e5m2. Values that are infinite or NaN have the scale NaN, so that the product is NaN as
well, as in any other dtype. All zeros stay zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Exponents of the largest values, whose significand is 1.75.
_TOP = {E4M3: 8, E5M2: 15}

_SIGNIFICAND_BITS = 23
# Carries into the exponent of a float32 whose significand is above 1.75.
_CARRY = 0x1FFFFF
_BIAS = 127
# A scale and its inverse are both normal numbers between these exponents, with the bias.
_LEAST, _MOST = 2, 252


class Fp8Values(NamedTuple):
    """Values · inverse are what was cast. `inverse` is a scalar, a column (one for each row) or a row."""

    values: Tensor
    inverse: Tensor


def scale_of(largest: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (scale, its inverse) for values of at most this magnitude, which is float32."""
    # The exponent, with its bias, of the least 1.75 · 2ⁿ that is not below the largest value.
    exponent = (largest.view(torch.int32) + _CARRY) >> _SIGNIFICAND_BITS
    scale = (2 * _BIAS + _TOP[dtype] - exponent).clamp(_LEAST, _MOST)
    finite = largest <= torch.finfo(torch.float32).max
    nan = torch.full_like(largest, torch.nan)
    return tuple(  # type: ignore[return-value]
        torch.where(finite, (bits << _SIGNIFICAND_BITS).view(torch.float32), nan) for bits in (scale, 2 * _BIAS - scale)
    )


def reciprocal(power: Tensor) -> Tensor:
    """Return 1 / a power of two, exactly: compiled code may divide with an error in the last bit."""
    return ((2 * _BIAS << _SIGNIFICAND_BITS) - power.view(torch.int32)).view(torch.float32)


def cast(tensor: Tensor, *, dtype: torch.dtype, dim: int | None = None) -> Fp8Values:
    """Cast a matrix with one scale, or with one for each row (`dim` = 1) or column (`dim` = 0)."""
    magnitudes = tensor.detach().abs()
    largest = magnitudes.amax() if dim is None else magnitudes.amax(dim=dim, keepdim=True)
    scale, inverse = scale_of(largest.to(torch.float32), dtype=dtype)
    return Fp8Values(cast_by(tensor, scale, dtype=dtype), inverse)


def cast_by(tensor: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Cast with a scale that is known."""
    return (tensor.detach().to(torch.float32) * scale).to(dtype)
