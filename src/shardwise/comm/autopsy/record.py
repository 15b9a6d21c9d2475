"""The record of one rank: what it had issued when it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.base.files.form import Form, each, string, table
from shardwise.base.files.keys import key, object_of

_BY_RANK = Form(
    words="a table of ranks",
    fits=lambda value: isinstance(value, dict) and all(rank.isdecimal() for rank in value),
    read=lambda value, path: {int(rank): string(place, f"{path}.{rank}") for rank, place in value.items()},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective."""

    number: int = key(..., "its place among those of its group, the same on all ranks")
    name: str = key(..., "an operation and its sizes, or an operation of the step program and its unit", form=string)
    ended: bool = key(..., "whether it was over on this rank")
    place: str = key("", "the line of the user's code that issued it, where the record has it", form=string)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The collectives of one group."""

    ranks: tuple[int, ...] = key(..., "its members, where the record has them")
    issued: Sequence[Issued] = key(..., "in the order of their numbers", form=each(object_of(Issued), least=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The groups of one rank by name. The other fields are empty, except in a record of our own."""

    rank: int = key(..., "its number in the job", least=0)
    groups: Mapping[str, GroupRecord] = key(..., "group → its collectives")
    state: str = key("", "where it stood, in words, and what its step program says next", form=string)
    failed: str = key("", "the rank's own error that ended it; empty if it waited for others", form=string)
    heard: Mapping[int, str] = key(dict, "rank → where it stood when this rank last heard from it", form=_BY_RANK)
    program: Mapping[str, Sequence[str]] = key(
        dict, "group → the collectives of a step, in the order of the step program", form=table(each(string))
    )
