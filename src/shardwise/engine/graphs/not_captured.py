"""Why something could not be recorded, in one line that names the user's source."""

import linecache
import traceback
from pathlib import Path

_OWN_PACKAGES = ("torch", "shardwise")
# The beginning of torch's error for code that would have to be compiled again during a recording.
_RECOMPILES = "Detected recompile when torch.compile stance is 'fail_on_recompile'."


class NotCaptured(Exception):  # noqa: N818 - never leaves this package
    """A unit cannot be recorded. The message is the reason, in one line."""


def in_one_line(error: BaseException) -> str:
    """Return what went wrong, after the last line of the user's source that the error passed through."""
    if isinstance(error, NotCaptured):
        return str(error)
    message = str(error).strip().splitlines()[0][:200]
    if message.startswith(_RECOMPILES):
        return f"torch.compile compiles again when the unit is recorded: {message.removeprefix(_RECOMPILES).strip()}"
    place = _failing_line(error)
    return f"{place}: {message}" if place else message


def _failing_line(error: BaseException) -> str:
    """Return the last line of source outside of torch and this package that an error passed through; "" if none.

    Frames are classified by module, not by path: a user's code may be in a folder called `shardwise`.
    """
    users = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OWN_PACKAGES
    ]
    if not users:
        return ""
    file, number = users[-1]
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" ({text[:80]})" if text else "")
