"""Tables in HTML for notebooks (`_repr_html_`): escaped text, in the notebook's own style."""

from collections.abc import Iterable, Sequence


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", text: str = "") -> str:
    """Return a table, with a title above it and a sentence below it."""
    from html import escape

    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<strong>{escape(title)}</strong>" if title else ""
    below = f"<p>{escape(text)}</p>" if text else ""
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
