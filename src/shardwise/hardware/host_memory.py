"""The memory of this host. No torch here."""

from pathlib import Path


def free_host_bytes() -> int:
    """Return the memory available to a process on this machine and in its control group; cached files count as free."""
    room = _field("/proc/meminfo", "MemAvailable:") * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        used = int((group / "memory.current").read_text()) - _field(group / "memory.stat", "inactive_file")
        room = min(room, int(text) - used)
    return room


def _field(path: Path | str, name: str) -> int:
    """Read the number that follows a name in one of the kernel's tables."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == name)
