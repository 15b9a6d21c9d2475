"""Requests to an object store: tried again after failures that may pass, and their errors without secrets."""

import errno
import os
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Eight attempts take 25 seconds in all: a store that asks to slow down is asked less and less often.
MOST_ATTEMPTS = 8
_FIRST_PAUSE_SECONDS = 0.2

# The user has to act: another attempt would fail in the same way.
_LASTING = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
_SECRET_NAME = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_LEAST_SECRET_LENGTH = 8


def attempted(action: Callable[[], T], *, most: int = MOST_ATTEMPTS) -> T:
    """Return what a request returns; after the last attempt raise an OSError of one line, without secrets."""
    # Not the generator of the training, whose state is a part of its result.
    shorter = random.SystemRandom()
    for attempt in range(most):
        try:
            return action()
        except Exception as error:
            number = _lasting(error)
            if number is None and attempt + 1 < most:
                # Ranks that were turned away together do not come back together.
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * shorter.uniform(0.5, 1))
                continue
            times = f"{attempt + 1} attempts, the last: " if attempt else ""
            # Without the original, which a traceback would show with all that the driver put into it.
            raise OSError(number or errno.EIO, f"{times}{redacted(_text(error))}") from None
    raise AssertionError("at least one attempt is made")


def _lasting(error: Exception) -> int | None:
    """Return the number of an error that another attempt would not change; None for others."""
    for kind, number in _LASTING.items():
        if isinstance(error, kind):
            return number
    # Drivers have classes of their own for missing or refused credentials.
    return errno.EACCES if re.search("Credential|Authentication", type(error).__name__) else None


def _text(error: Exception) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:300] or type(error).__name__


def redacted(text: str) -> str:
    """Return a text without the values of secret variables of the environment, and without the queries of URLs."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET_LENGTH:
            text = text.replace(value, "***")
    return _QUERY.sub(r"\1?***", text)
