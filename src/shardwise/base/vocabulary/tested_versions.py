"""The versions of torch that the test suite was run on, and those of the libraries that our integrations extend.

The engine uses private names of torch (torch_internals/), and the integrations override methods of the libraries,
some of them private: another version may have changed them. Newer ones are not refused; a warning names them.
"""

import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

# From the oldest that Shardwise supports to the newest: all of tests/ passes on each, except what needs a GPU. Since
# TorchDynamo traces units, all of it was run on 2.13.0, the tests of units as graphs on 2.11.0 and 2.15.0 as well, and
# nothing on a GPU. README.md and pyproject.toml repeat the list; tests/unit/test_package.py compares them.
TESTED_TORCH = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")

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


def untested_torch(found: str) -> str:
    """Return one line if torch `found` is outside of the tested minor releases, oldest to newest, else ""."""
    oldest, newest = TESTED_TORCH[0], TESTED_TORCH[-1]
    release = _numbers(found)[:2]
    if release and release < _numbers(oldest)[:2]:
        return f"torch {found} is older than {oldest}, the oldest that Shardwise supports: install torch {newest}"
    if release > _numbers(newest)[:2]:
        return (
            f"torch {found} is newer than {newest}, the newest that Shardwise's test suite was run on: compare a few "
            f"steps with torch's own DDP before you rely on it, or install torch {newest}"
        )
    return ""


def installed_torch() -> str:
    """Return the version of the torch that is installed, without importing it; "" if none is."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


@cache
def warn_if_untested_torch() -> None:
    """Warn once per process if the installed torch is outside of the tested releases."""
    line = untested_torch(installed_torch())
    if line:
        warnings.warn(line, stacklevel=3)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the parts before the first one that is not a number: 1.15.0rc1 → (1, 15), 2.15+cpu → (2, 15)."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
