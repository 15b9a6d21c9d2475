"""Numbers as people read them: three digits and a unit."""

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def digits(value: float) -> str:
    """At least three digits that mean something, and all of those before the point."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def scientific(value: float) -> str:
    """Two digits; far from 1 with a power of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}"
    number, _, power = f"{value:.1e}".partition("e")
    return f"{number} × 10{str(int(power)).translate(_RAISED)}"


def byte_unit(largest: float) -> tuple[int, str]:
    """The unit in which all of a chart is shown."""
    return next((unit for unit in _BYTE_UNITS if largest >= unit[0]), _BYTE_UNITS[-1])


def second_unit(largest: float) -> tuple[float, str]:
    return next((unit for unit in _SECOND_UNITS if largest >= unit[0]), _SECOND_UNITS[-1])


def in_units(num_bytes: float, size: int) -> str:
    """In a column of one unit, where what is too small for it is all the same."""
    value = num_bytes / size
    return "< 0.01" if 0 < value < 0.01 else digits(value)


def bytes_text(num_bytes: float) -> str:
    size, unit = byte_unit(num_bytes)
    return f"{digits(num_bytes / size)} {unit}"


def seconds_text(seconds: float) -> str:
    if not seconds:
        return "0 s"
    size, unit = second_unit(seconds)
    return f"{digits(seconds / size)} {unit}"


def error_text(error: float | None) -> str:
    """How far a prediction is off; "not measured" where nobody can say."""
    if error is None:
        return "not measured"
    # What rounds to nothing has no sign.
    return f"{error:+.1%}".replace("-", "−") if abs(error) >= 0.0005 else "0.0%"
