"""Laws: a number of bytes, operations or elements as a function of the batch and of the length of a sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple


class Line(NamedTuple):
    """const + per_sample · batch, at a given length of sample.

    A tuple, because a plan makes millions, and they are keys.
    """

    const: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.const + self.per_sample * batch


@dataclass(frozen=True, slots=True)
class Law:
    """c₀ + c₁·s + c₂·s² + batch · (b₀ + b₁·s + b₂·s²), where s is the length of a sample.

    If only one length was traced, only c₀ and b₀ are nonzero.
    """

    terms: tuple[int, int, int, int, int, int]

    def line(self, seq: int | None = None) -> Line:
        """Return the law at one length; None for models whose samples have no length."""
        c0, c1, c2, b0, b1, b2 = self.terms
        if seq is None:
            return Line(c0, b0)
        return Line(c0 + (c1 + c2 * seq) * seq, b0 + (b1 + b2 * seq) * seq)

    def at(self, *, batch: int, seq: int | None = None) -> int:
        return self.line(seq).at(batch)


def fit(values: Mapping[tuple[int, int], int]) -> Law | None:
    """Return the law through values at (batch, length), for two batches and one length or three; None if none passes.

    Further points are checked, not fitted. Coefficients must be integers, because bytes and operations are counted, and
    the value at batch 0 must not be negative, as it would be for a number that grows with the square of the batch.
    """
    return _fit(tuple(values.items()))


@lru_cache(maxsize=4096)
def _fit(items: tuple[tuple[tuple[int, int], int], ...]) -> Law | None:
    values = dict(items)
    batches = list(dict.fromkeys(batch for batch, _ in values))
    lengths = list(dict.fromkeys(length for _, length in values))
    curves = {}
    for batch in batches[:2]:
        points = [(length, values[batch, length]) for length in lengths[:3] if (batch, length) in values]
        curves[batch] = _parabola(points)
    first, second = batches[:2]
    slopes = [(high - low) / (second - first) for low, high in zip(curves[first], curves[second], strict=True)]
    consts = [low - slope * first for low, slope in zip(curves[first], slopes, strict=True)]
    terms = [*consts, *slopes]
    if any(term.denominator != 1 for term in terms):
        return None
    c0, c1, c2, b0, b1, b2 = (int(term) for term in terms)
    law = Law((c0, c1, c2, b0, b1, b2))
    fits = all(law.at(batch=batch, seq=length) == value for (batch, length), value in values.items())
    return law if fits and all(law.line(length).const >= 0 for length in lengths) else None


def _parabola(points: Sequence[tuple[int, int]]) -> list[Fraction]:
    """Return the coefficients of the polynomial through one point or three."""
    if len(points) == 1:
        return [Fraction(points[0][1]), Fraction(0), Fraction(0)]
    (x0, y0), (x1, y1), (x2, y2) = points
    slope01, slope12 = Fraction(y1 - y0, x1 - x0), Fraction(y2 - y1, x2 - x1)
    square = (slope12 - slope01) / (x2 - x0)
    linear = slope01 - square * (x0 + x1)
    return [y0 - linear * x0 - square * x0 * x0, linear, square]
