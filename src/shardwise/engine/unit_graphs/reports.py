"""Lines that tell the user which units run as CUDA graphs, each once."""

from collections.abc import Sequence

from shardwise.engine.protocol import Tell
from shardwise.engine.unit_graphs.watched_unit import WatchedUnit


class Reports:
    """Passes each line on to `tell` the first time."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._has_graphs = False
        self._failures: set[str] = set()

    def graphs(self, units: Sequence[WatchedUnit]) -> None:
        """Report that there are graphs, and how many units have none."""
        if self._has_graphs:
            return
        self._has_graphs = True
        eager = [one for one in units if one.why_not]
        line = f"capture: {len(units) - len(eager)} units run as CUDA graphs from here on"
        if eager:
            line += f", {len(eager)} as ordinary ones ({eager[0].name}: {eager[0].why_not})"
        self._tell(line)

    def failure(self, units: Sequence[WatchedUnit], why: str) -> None:
        """Report why units could not be recorded; others are tried again without those that failed."""
        if why and why not in self._failures:
            self._failures.add(why)
            names = [one.name for one in units if one.why_not == why]
            self._tell(f"capture: ordinary units, not CUDA graphs: {', '.join(names[:3])}: {why}")
