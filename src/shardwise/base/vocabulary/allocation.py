"""An allocation that was seen while code ran."""

from dataclasses import dataclass

FOREVER = 2**63
"""The moment at which a storage that is never freed is freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One storage; `born` and `freed` are moments in any unit."""

    address: int
    num_bytes: int
    born: int
    freed: int = FOREVER
    is_scratch: bool = False
