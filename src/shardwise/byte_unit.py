"""The unit in which sizes that stand together are shown."""

from collections.abc import Iterable

_MIB, _GIB = 2**20, 2**30
# Below, GiB would leave no digits.
_LARGE_BYTES = 8 * _GIB


def byte_unit(sizes: Iterable[int]) -> tuple[int, str]:
    """(its bytes, its name), by the largest of them."""
    return (_GIB, "GiB") if max(sizes, default=0) >= _LARGE_BYTES else (_MIB, "MiB")
