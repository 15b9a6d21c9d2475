"""Lines that tell the user which units run as CUDA graphs, each once."""

from collections.abc import Callable, Sequence

from shardwise.engine.graphs.traced_unit import TracedUnit

Tell = Callable[[str], None]


class Reports:
    """Passes each line on to `tell` the first time."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._has_graphs = False
        self._lines: set[str] = set()

    def graphs(self, units: Sequence[TracedUnit]) -> None:
        """Report that there are graphs, and how many units have none."""
        if self._has_graphs:
            return
        self._has_graphs = True
        ordinary = [(one.name, why) for one in units if (why := one.reason())]
        line = f"capture: {len(units) - len(ordinary)} units run as CUDA graphs from here on"
        if ordinary:
            name, why = ordinary[0]
            line += f", {len(ordinary)} as ordinary ones ({name}: {why})"
        self._tell(line)

    def failure(self, units: Sequence[TracedUnit], why: str) -> None:
        """Report why units could not be recorded; others are tried again without those that failed."""
        names = [one.name for one in units if one.reason() == why]
        if why and names:
            self.note(f"capture: ordinary units, not CUDA graphs: {', '.join(names[:3])}: {why}")

    def note(self, line: str) -> None:
        """Pass a line on, once."""
        if line not in self._lines:
            self._lines.add(line)
            self._tell(line)
