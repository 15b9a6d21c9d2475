"""What a page may do: nothing is loaded, and nothing runs but what is named by its hash."""

import base64
import hashlib
from collections.abc import Sequence


def content_policy(style: str, scripts: Sequence[str], *, connects: bool = False) -> str:
    """The policy of a page with this style and these scripts; `connects`: it asks the server that it came from."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {' '.join(map(_hash, scripts)) or repr('none')}",
            "img-src data:",
            *(["connect-src 'self'"] if connects else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(content: str) -> str:
    """As a browser computes it: of the very characters between the tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
