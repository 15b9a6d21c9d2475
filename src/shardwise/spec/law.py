"""How a number grows with the batch and with the length of a sample: the planner's laws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Line:
    """const + per_sample · batch, in the length of sample that was asked for."""

    const: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.const + self.per_sample * batch


@dataclass(frozen=True, slots=True)
class Law:
    """c₀ + c₁·s + c₂·s² + batch · (b₀ + b₁·s + b₂·s²), with s the length of a sample.

    Where the length was not varied, all of it is in c₀ and b₀.
    """

    terms: tuple[int, int, int, int, int, int]

    def line(self, seq: int | None = None) -> Line:
        """The law at one length; None where the length plays no part."""
        c0, c1, c2, b0, b1, b2 = self.terms
        if seq is None:
            return Line(c0, b0)
        return Line(c0 + (c1 + c2 * seq) * seq, b0 + (b1 + b2 * seq) * seq)

    def at(self, *, batch: int, seq: int | None = None) -> int:
        c0, c1, c2, b0, b1, b2 = self.terms
        if seq is None:
            return c0 + b0 * batch
        return c0 + (c1 + c2 * seq) * seq + (b0 + (b1 + b2 * seq) * seq) * batch


def fit(values: Mapping[tuple[int, int], int]) -> Law | None:
    """The law through values at (batch, length): two batches, and one length or three; None where none passes.

    Further points are not fitted but checked. Coefficients are whole numbers, because bytes and operations are counted;
    and what is there for an empty batch is not less than nothing, as it would be for what grows with the batch squared.
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
    """The coefficients of the polynomial through one point or three."""
    if len(points) == 1:
        return [Fraction(points[0][1]), Fraction(0), Fraction(0)]
    (x0, y0), (x1, y1), (x2, y2) = points
    slope01, slope12 = Fraction(y1 - y0, x1 - x0), Fraction(y2 - y1, x2 - x1)
    square = (slope12 - slope01) / (x2 - x0)
    linear = slope01 - square * (x0 + x1)
    return [y0 - linear * x0 - square * x0 * x0, linear, square]
