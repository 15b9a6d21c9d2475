"""The versions of other libraries that our integrations were tested with. They override methods of those libraries of
which some are private, so that another version may call others.
"""

import warnings
from importlib.metadata import version

# Library → the first version that was tested, and the first that was not.
TESTED: dict[str, tuple[str, str]] = {
    "accelerate": ("1.15", "1.16"),
    "lightning": ("2.6", "2.7"),
    "transformers": ("5.22", "5.23"),
}


def warn_if_untested(library: str) -> None:
    """Warn, in one line, where the installed version is outside of the tested range."""
    found = version(library)
    first, beyond = TESTED[library]
    if not _numbers(first) <= _numbers(found)[:2] < _numbers(beyond):
        warnings.warn(
            f"{library} {found}: Shardwise's integration is tested with {library} >= {first}, < {beyond} and uses "
            "private methods of it; compare a few steps with the library's own DDP before you rely on it",
            stacklevel=2,
        )


def _numbers(text: str) -> tuple[int, ...]:
    """1.15.0rc1 → (1, 15): what comes before the first part that is no number."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
