"""Tables for the terminal, without borders; and memory as bars, with a letter and a colour for each category."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, GATHERED, GRADS, OPTIM, OTHER, PARAMS, REDUCE

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


STYLES: Mapping[str, str] = {
    PARAMS: "blue",
    GATHERED: "cyan",
    GRADS: "magenta",
    REDUCE: "bright_magenta",
    OPTIM: "green",
    ACTIVATIONS: "yellow",
    OTHER: "bright_black",
}
LETTERS = {PARAMS: "P", GATHERED: "W", GRADS: "G", REDUCE: "R", OPTIM: "O", ACTIVATIONS: "A", OTHER: "x"}


def bar(parts: Mapping[str, int], *, capacity: int, width: int) -> Text:
    """Draw the bytes of each category as its letter, and dots up to the capacity; » marks what exceeds it."""
    text = Text()
    end = 0
    for name in CATEGORIES:
        start, end = end, end + parts[name]
        length = round(end * width / capacity) - round(start * width / capacity)
        text.append(LETTERS[name] * length, style=STYLES[name])
    if len(text) > width:
        text.truncate(width)
        text.append("»", style="red")
        return text
    text.append("·" * (width - len(text)), style="bright_black")
    return text


def legend() -> Text:
    """Return the meaning of the letters in a bar."""
    text = Text()
    for name in CATEGORIES:
        text.append(f"{LETTERS[name]} ", style=STYLES[name])
        text.append(f"{name}  ")
    return text
