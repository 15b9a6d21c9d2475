"""The current pass: whether it is one of several in a step, and whether ranks have nothing left to do."""

from dataclasses import dataclass

from shardwise.errors import InvalidModel


@dataclass(slots=True, kw_only=True)
class PassState:
    """The way in which the user's loop runs this pass.

    accumulating   its gradients are one part of a step's
    num_counting   how many ranks have data in it; None: all
    counts         whether this rank has; without, it takes part and adds nothing
    source         the rank whose buffers count
    values_by      the block of code in which no step may run, since parameters have other values or are being read; ""
                   outside of one
    lent           whether they have other memory, too
    by_parts       code that runs backward by itself calls parts of the model, in any order (part_calls.py)
    """

    accumulating: bool = False
    num_counting: int | None = None
    counts: bool = True
    source: int = 0
    values_by: str = ""
    lent: bool = False
    by_parts: bool = False

    def check_values(self, what: str) -> None:
        """Refuse what needs the values of training."""
        if self.values_by:
            raise InvalidModel(f"{what} inside {self.values_by}: do it after the block")

    def check_memory(self, what: str) -> None:
        """Refuse what needs the parameters where they are in a step."""
        if self.lent:
            self.check_values(what)

    def weight(self, *, num_ranks: int) -> float:
        """Return the factor of this rank's gradients with which a sum over all ranks / num_ranks is the average over
        the ranks that count.
        """
        if not self.counts:
            return 0.0
        return 1.0 if self.num_counting is None else num_ranks / self.num_counting
