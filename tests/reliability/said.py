"""Lines that a user would see, noted down by the tests that check them, so that the page can show the real ones.

A rank notes them in its own process; `run_ranks` carries them to the test's.
"""

_SAID: list[str] = []


def say(line: str) -> str:
    """Note a line; it is returned as it is."""
    _SAID.append(line)
    return line


def take() -> list[str]:
    """All lines since the last time, in order."""
    said = _SAID.copy()
    _SAID.clear()
    return said
