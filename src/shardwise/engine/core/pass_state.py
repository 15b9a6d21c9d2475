"""How the current pass counts: with others in one step, and with ranks that have nothing left to do."""

from dataclasses import dataclass
from typing import Protocol

from shardwise.errors import InvalidModel


class StepWatcher(Protocol):
    """Is told where a step stands, also by autograd's threads."""

    def last_backward_begins(self) -> None:
        """The backward of a pass that accumulates for no later one begins."""
        ...

    def passes_are_over(self) -> None:
        """All gradients are there; clipping and the update come next. May be told more than once."""
        ...


@dataclass(slots=True, kw_only=True)
class PassState:
    """What the user's loop has said of this pass.

    accumulating   its gradients are one part of a step's
    num_counting   how many ranks have data in it; None: all
    counts         whether this rank has; without, it takes part and adds nothing
    source         the rank whose buffers count
    watcher        who notes or records the step, while that is done
    values_by      the block of code in which no step may run, since parameters have other values or are being read; ""
                   outside of one
    lent           whether they have other memory, too
    failed         how this rank has run out of memory in this step, in one line: it takes part in what is left of it,
                   and adds nothing (out_of_memory/skipped.py); "" if it has not
    num_forwards   of the last backward
    """

    accumulating: bool = False
    num_counting: int | None = None
    counts: bool = True
    source: int = 0
    watcher: StepWatcher | None = None
    values_by: str = ""
    lent: bool = False
    failed: str = ""
    num_forwards: int = 1

    def check_values(self, what: str) -> None:
        """Refuse what needs the values of training."""
        if self.values_by:
            raise InvalidModel(f"{what} inside {self.values_by}: do it after the block")

    def check_memory(self, what: str) -> None:
        """Refuse what needs the parameters where they are in a step."""
        if self.lent:
            self.check_values(what)

    def begin_backward(self, *, num_forwards: int) -> None:
        """A backward begins, after so many forwards."""
        self.num_forwards = num_forwards
        if self.watcher is not None and not self.accumulating:
            self.watcher.last_backward_begins()

    def end(self) -> None:
        """Whatever reads or changes the gradients of a step says so here first."""
        if self.watcher is not None:
            self.watcher.passes_are_over()

    def weight(self, *, num_ranks: int) -> float:
        """What this rank's gradients are multiplied with, so that a sum over all ranks / num_ranks is the average
        over those that count."""
        if not self.counts or self.failed:
            return 0.0
        return 1.0 if self.num_counting is None else num_ranks / self.num_counting
