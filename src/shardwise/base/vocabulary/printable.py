"""Text that is safe on a terminal: names from files may hold escape codes, which a terminal would obey."""

from unicodedata import category


def printable(text: str) -> str:
    """Return the text with each control, format and lone surrogate character, and each line end, as `?`."""
    return "".join(sign if sign.isprintable() or category(sign) == "Zs" else "?" for sign in text)


def printable_lines(text: str) -> str:
    """Return the text like `printable`; line ends and tabs stay."""
    return "".join(sign if sign in "\n\t" else printable(sign) for sign in text)
