"""The versions of other libraries that our integrations were tested with.

The integrations override methods of those libraries. Some are private, so that another version may call others.
"""

import warnings
from importlib.metadata import version

# Library → the first tested version, and the first untested one after it.
TESTED: dict[str, tuple[str, str]] = {
    "accelerate": ("1.15", "1.16"),
    "lightning": ("2.6", "2.7"),
    "transformers": ("5.22", "5.23"),
}


def warn_if_untested(library: str) -> None:
    """Warn if the installed version is outside the tested range."""
    found = version(library)
    first, beyond = TESTED[library]
    if not _numbers(first) <= _numbers(found)[:2] < _numbers(beyond):
        warnings.warn(
            f"{library} {found}: Shardwise's integration is tested with {library} >= {first}, < {beyond} and uses "
            "private methods of it; compare a few steps with the library's own DDP before you rely on it",
            stacklevel=2,
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the parts before the first one that is not a number: 1.15.0rc1 → (1, 15)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
