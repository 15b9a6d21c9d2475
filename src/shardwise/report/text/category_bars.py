"""Draws the categories of memory as bars: a letter and a colour for each category."""

from collections.abc import Mapping

from rich.text import Text

from shardwise.vocabulary.categories import ACTIVATIONS, CATEGORIES, GATHERED, GRADS, OPTIM, OTHER, PARAMS, REDUCE

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
