"""Makes a complete HTML document of a style, scripts and a body.

Its content security policy allows no loading, and no style or script other than those, each named by its hash.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from shardwise.measure.report.page.markup import Child, Markup, element


def asset(name: str, *, package: str = "shardwise.measure.report.page") -> str:
    """Return the text of a style, script or HTML file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def html_document(
    title: str, *body: Child, style: str, scripts: Sequence[str], connects_to_server: bool = False
) -> str:
    """Return the document; with `connects_to_server` it may send requests to the server that it came from."""
    policy = [
        "default-src 'none'",
        f"style-src {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts)) or repr('none')}",
        "img-src data:",
        *(["connect-src 'self'"] if connects_to_server else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content="; ".join(policy)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(style)),
    )
    content = element("body", *body, *(element("script", Markup(script)) for script in scripts))
    return f"<!doctype html>\n{element('html', head, content, lang='en')}\n"


def _hash(content: str) -> str:
    """Return the hash as a browser computes it, of the exact characters between the tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
