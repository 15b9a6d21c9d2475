"""Small layers that count as large, so that the cut takes them out of the root."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.program.units import unit_modules


@contextmanager
def counted_as_large(num_parameters: int) -> Iterator[None]:
    """Lower what a layer needs to be a unit of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(unit_modules.__globals__, "LARGE_ROOT_LAYER", num_parameters)
        yield
