"""The record of one rank: what it had issued when it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective.

    number   its number in the group, the same on all ranks
    name     an operation and its sizes, or an operation of the step program and its unit
    ended    whether it had ended on this rank
    place    the line of the user's code that issued it, if the record has it
    """

    number: int
    name: str
    ended: bool
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The collectives of one group; `ranks`: its members, if the record has them."""

    ranks: tuple[int, ...]
    issued: Sequence[Issued]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's groups by name. Only our own records have the rest:

    state     where it stood, in words, and what comes next in its step program
    failed    its own error that ended it, or "" if it waited for others
    heard     other rank → where it stood when it was last heard
    program   group → the collectives of a step, in the order of the step program
    """

    rank: int
    groups: Mapping[str, GroupRecord]
    state: str = ""
    failed: str = ""
    heard: Mapping[int, str] = field(default_factory=dict)
    program: Mapping[str, Sequence[str]] = field(default_factory=dict)
