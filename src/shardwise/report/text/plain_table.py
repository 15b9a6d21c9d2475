"""Tables for the terminal, without borders."""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(
    heads: Collection[str], *, right: Collection[str] = (), wraps: Collection[str] = (), gap: int = 2
) -> "Table":
    """Return an empty table with `gap` spaces between its columns.

    The columns `right` are aligned right, the others left; text is wrapped only in the columns `wraps`.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=head not in wraps)
    return table
