"""Processes of this machine, as /proc shows them."""

import os
import time
from contextlib import suppress
from pathlib import Path

# As /proc/net/tcp and tcp6 write it.
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def processes_with(variable: str) -> list[str]:
    """The command lines of the live processes that were started with `variable` (`NAME=value`) in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def left_with(variable: str, *, limit_seconds: float = 5.0) -> list[str]:
    """The same, of those that do not go within a moment: on a busy machine a process that was killed takes one."""
    deadline = time.monotonic() + limit_seconds
    while (left := processes_with(variable)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def ranks_left(*, limit_seconds: float = 5.0) -> list[str]:
    """The names of the live ranks of a launcher in this process, once they have had a moment to go.

    Ranks that are forked have the environment of what they are forked from, so that no variable tells them apart.
    """
    deadline = time.monotonic() + limit_seconds
    while (left := _children_named("shardwise ")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _children_named(start: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if name.startswith(start) and int(parent) == os.getpid() and state != "Z":
                found.append(name)
    return found


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """The addresses and ports on which these processes listen for TCP connections, as (hexadecimal address, port)."""
    inodes = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(str(link.readlink()))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found
