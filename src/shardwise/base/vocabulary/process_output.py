"""What a process has written, without what torch's libraries print on their own."""

import re

# As a process ends, the triton of torch 2.15 lists what its bindings leak; torch's profiler prints its probes. Neither
# has an option against it, and the last line of a process that failed is the reason.
_OF_LIBRARIES = re.compile(r"nanobind: | - (leaked |\.\.\. skipped )|See https://nanobind\.|USDT:")


def own_lines(output: str) -> list[str]:
    """Return the lines that the program itself has written."""
    return [line for line in output.splitlines() if not _OF_LIBRARIES.match(line)]
