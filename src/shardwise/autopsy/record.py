"""What one rank had issued when it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective.

    number   its place among those of its group, the same on all ranks
    name     what it is: an operation and its sizes, or an operation of the step program and its unit
    ended    whether it was over on this rank
    place    the line of the user's code that issued it, where the record has it
    """

    number: int
    name: str
    ended: bool
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The collectives of one group; `ranks`: its members, where the record tells."""

    ranks: tuple[int, ...]
    issued: Sequence[Issued]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's groups by name; and, of a record of our own:

    state     where it stood, in words, and what its step program says next
    failed    the error of its own that ended it; "" where it waited for others
    heard     rank → where it stood, as this one has heard last
    program   group → the collectives of a step, in the order of the step program
    """

    rank: int
    groups: Mapping[str, GroupRecord]
    state: str = ""
    failed: str = ""
    heard: Mapping[int, str] = field(default_factory=dict)
    program: Mapping[str, Sequence[str]] = field(default_factory=dict)
