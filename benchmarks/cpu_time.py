"""How much processor time this process and all that it started have used."""

import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """User and system time, of processes that run and of those that have ended and were waited for.

    A machine that others use as well makes a row slow, but hardly changes this.
    """
    times, parents = _read_all()
    total = 0
    for process in times:
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            total += times[process]
    return total / _TICKS_PER_SECOND


def _read_all() -> tuple[dict[int, int], dict[int, int]]:
    """By process: its ticks, with those of its ended children, and its parent."""
    times, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of the program is in brackets and may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            # It ended just now.
            continue
        times[int(folder.name)] = sum(map(int, fields[11:15]))
        parents[int(folder.name)] = int(fields[1])
    return times, parents
