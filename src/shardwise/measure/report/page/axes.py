"""Round numbers for an axis."""

import math

from shardwise.base.vocabulary.quantities import byte_unit, second_unit

Tick = tuple[float, str]
"""A place on the axis, and the text there."""


def round_step(span: float, *, num_steps: int = 4) -> float:
    """Return the smallest of 1, 2, 2.5, 5 × 10ⁿ that divides `span` into at most `num_steps`."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / num_steps))
    return next(step * power for step in (1, 2, 2.5, 5, 10, 20) if span / (step * power) <= num_steps * (1 + 1e-9))


def ticks(highest: float, *, unit: tuple[float, str] = (1.0, "")) -> list[Tick]:
    """Return ticks from 0 up to at most `highest`, at round numbers of the unit; the last one names the unit."""
    size, name = unit
    step = round_step(highest / size)
    values = [index * step for index in range(int(highest / size / step * (1 + 1e-9)) + 1)]
    texts = [f"{value:,g}" for value in values]
    if name:
        texts[-1] += f" {name}"
    return [(value * size, text) for value, text in zip(values, texts, strict=True)]


def byte_ticks(highest: float) -> list[Tick]:
    return ticks(highest, unit=byte_unit(highest))


def second_ticks(highest: float) -> list[Tick]:
    return ticks(highest, unit=second_unit(highest))


def between(low: float, high: float) -> list[Tick]:
    """Return ticks of an axis that does not start at 0; at least one."""
    step = round_step(high - low, num_steps=6)
    first = math.ceil(low / step - 1e-9)
    places = max(0, -math.floor(math.log10(step) + 1e-9) + (1 if f"{step:e}".startswith("2.5") else 0))
    values = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, f"{value:,.{places}f}") for value in values] or [(low, f"{low:g}")]
