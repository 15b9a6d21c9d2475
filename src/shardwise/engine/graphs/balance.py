"""Whether graphs are worth their memory and their recordings: when they make way for passes without them.

Together, graphs and ordinary passes are to need no more memory than ordinary passes alone. All forms share the memory
of the largest one that was seen; an ordinary pass would need as much again. So, while there are graphs, a new form is
recorded at once, and for a larger one the graphs are dropped. Where forms hardly repeat, graphs do not repay their
recordings; then they are dropped as well, and later ones wait longer.
"""

from typing import Any

# Replays that repay a recording, and those that may be owed.
_REPAID_BY = 4
_MOST_OWED = 64
# How much longer forms are ordinary at first, after graphs that were dropped before they had repaid their recordings.
_LONGER = 2
# The most that passes with graphs reserve, by what those without reserved.
_MOST_RESERVED = 1.05


class Balance:
    """What the graphs of one model have cost and gained.

    most_elements      of the inputs of a pass that trains
    patience           how many times as long as usual a form is ordinary at first
    needs_warm_up      whether a form cannot be recorded at once: its first pass measures kernels, for example
    """

    def __init__(self) -> None:
        self.most_elements = 0
        self.patience = 1
        self.needs_warm_up = False
        self._owed = 0
        self._reserved_bytes = 0
        self._alone: set[Any] = set()

    def note_recording(self) -> None:
        self._owed += _REPAID_BY

    def note_replay(self) -> None:
        self._owed -= 1

    def note_drop(self) -> None:
        if self._owed > 0:
            self.patience *= _LONGER
        self._owed = 0

    def note_ordinary(self, form: Any, reserved_bytes: int, *, holds_graphs: bool) -> None:
        """Note what is reserved after a pass that used no memory of graphs."""
        if not holds_graphs:
            self._reserved_bytes = max(self._reserved_bytes, reserved_bytes)
        elif reserved_bytes > _MOST_RESERVED * self._reserved_bytes:
            self._alone.add(form)

    def needs_all(self, form: Any) -> bool:
        """Return whether ordinary passes of this form need too much memory next to graphs."""
        return form in self._alone

    @property
    def pays(self) -> bool:
        """Return whether recordings were repaid often enough for another one."""
        return self._owed < _MOST_OWED
