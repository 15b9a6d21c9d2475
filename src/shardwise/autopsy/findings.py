"""Records of all ranks → what happened: who stopped, before which operation, and who waits for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwise.autopsy.record import GroupRecord, Issued, RankRecord

FAILED, STOPPED, DISAGREE = "failed", "stopped", "disagree"
WAITING, NO_RECORD, ENDED = "waiting", "no record", "ended"
# The surest first: ranks that fail, or issue different things, also seem to stop.
_ORDER = (FAILED, DISAGREE, STOPPED, NO_RECORD, WAITING, ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the records of one group say, or (`group` is "") a rank's own. `ranks`: whose fault it is, as far as they
    tell.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    text: str


def verdict(records: Sequence[RankRecord]) -> list[Finding]:
    """A finding for each rank that failed and for each group, what is most telling first."""
    by_rank = {record.rank: record for record in records}
    names = dict.fromkeys(name for record in records for name in record.groups)
    findings = [
        Finding(
            kind=FAILED,
            group="",
            ranks=(record.rank,),
            text=f"rank {record.rank} failed ({record.failed}){_state(record)}",
        )
        for record in records
        if record.failed
    ]
    findings += [_of_group(name, by_rank) for name in names]
    return sorted(findings, key=lambda finding: _ORDER.index(finding.kind))


def _of_group(name: str, by_rank: Mapping[int, RankRecord]) -> Finding:
    records = {rank: record.groups[name] for rank, record in by_rank.items() if name in record.groups}
    members = {rank for record in records.values() for rank in record.ranks} or set(by_rank)
    by_number = {rank: {one.number: one for one in record.issued} for rank, record in records.items()}
    different = _first_difference(by_number)
    if different is not None:
        text = _disagreement(different, by_number) + _by_program(name, different, records=by_rank.values())
        return Finding(kind=DISAGREE, group=name, ranks=(), text=text)
    last = {rank: record.issued[-1].number for rank, record in records.items()}
    silent = tuple(sorted(members - set(by_rank)))
    # A member that has a record, but not of this group, never came to it.
    behind = tuple(sorted(rank for rank in members & set(by_rank) if last.get(rank, 0) < max(last.values())))
    if behind:
        return Finding(kind=STOPPED, group=name, ranks=behind, text=_stop(name, behind, records, by_rank))
    open_ones = sorted(rank for rank, record in records.items() if not record.issued[-1].ended)
    if silent:
        text = f"{_listed(silent)} left no record: killed, stopped, or its machine is gone{_heard(silent, by_rank)}"
        waits = f"; {_listed(open_ones)} waited in {_shown(_first_open(records))}" if open_ones else ""
        return Finding(kind=NO_RECORD, group=name, ranks=silent, text=text + waits)
    if open_ones:
        text = f"{_listed(open_ones)} waited in {_shown(_first_open(records))}, which every rank has issued"
        return Finding(kind=WAITING, group=name, ranks=(), text=f"{text}: look at the network or a device")
    text = f"every rank has ended its last collective, {_shown(_latest(records))}"
    return Finding(kind=ENDED, group=name, ranks=(), text=text)


def _stop(
    name: str, behind: tuple[int, ...], records: Mapping[int, GroupRecord], by_rank: Mapping[int, RankRecord]
) -> str:
    """Who stopped before what: the first operation that the slowest of them has not issued."""
    ended_at = {rank: records[rank].issued[-1] if rank in records else None for rank in behind}
    lowest = min((one.number if one is not None else 0) for one in ended_at.values())
    slowest = [rank for rank, one in ended_at.items() if (one.number if one is not None else 0) == lowest]
    following = [one for record in records.values() for one in record.issued if one.number > lowest]
    missing = min(following, key=lambda one: one.number)
    waiting = sorted(rank for rank, record in records.items() if record.issued[-1].number > lowest)
    before = ended_at[slowest[0]]
    after = f" after {_shown(before)}" if before is not None else ""
    state = "".join(_state(by_rank[rank], subject=f"; rank {rank} was ") for rank in slowest)
    return (
        f"{_listed(slowest)} stopped{after} and did not come to {_shown(missing)}; {_listed(waiting)} "
        f"{'wait' if len(waiting) > 1 else 'waits'} for it{state}"
    )


def _first_difference(by_number: Mapping[int, Mapping[int, Issued]]) -> int | None:
    """The first number under which two ranks have issued different things. Rings of different ranks overlap partly."""
    numbers = sorted({number for issued in by_number.values() for number in issued})
    for number in numbers:
        if len({issued[number].name for issued in by_number.values() if number in issued}) > 1:
            return number
    return None


def _disagreement(number: int, by_number: Mapping[int, Mapping[int, Issued]]) -> str:
    by_name: dict[str, list[int]] = {}
    for rank, issued in sorted(by_number.items()):
        if number in issued:
            by_name.setdefault(_shown(issued[number]), []).append(rank)
    return f"as number {number}, " + "; ".join(f"{_listed(ranks)} issued {name}" for name, ranks in by_name.items())


def _by_program(name: str, number: int, *, records: Iterable[RankRecord]) -> str:
    """What the step program has in the place where ranks differ, after what they have issued alike."""
    for record in records:
        if name in record.groups and record.program.get(name):
            before = [one.name for one in record.groups[name].issued if one.number < number]
            expected = following(before, program=record.program[name])
            return f"; the step program has {expected} there" if expected else ""
    return ""


def following(issued: Sequence[str], *, program: Sequence[str]) -> str:
    """What comes after `issued` in a program that is run again and again; "" where it has no such place.

    Where several places come into question, the one whose past is the most like what was issued. A unit of several
    dtypes issues a collective for each, all of one name: these count as one.
    """
    done = [name for name, _ in groupby(one.partition(" of ")[0] for one in issued)]
    steps = [name for name, _ in groupby(program)]

    def alike(place: int) -> int:
        """How many names before this place are the last ones that were issued."""
        past = (steps[(place - 1 - back) % len(steps)] for back in range(len(done)))
        return next((back for back, name in enumerate(past) if name != done[-1 - back]), len(done))

    best = max(range(len(steps)), key=alike, default=None)
    return steps[best] if best is not None and done and alike(best) else ""


def _state(record: RankRecord, *, subject: str = ": ") -> str:
    return f"{subject}{record.state}" if record.state else ""


def _heard(silent: Sequence[int], by_rank: Mapping[int, RankRecord]) -> str:
    """Where ranks without a record stood, as the others have heard last."""
    told = {rank: record.heard[rank] for record in by_rank.values() for rank in silent if rank in record.heard}
    return "".join(f"; rank {rank} was last heard at {standing}" for rank, standing in sorted(told.items()))


def _first_open(records: Mapping[int, GroupRecord]) -> Issued:
    """What is waited for: those after it were issued ahead of their time."""
    return min(
        (one for record in records.values() for one in record.issued if not one.ended), key=lambda one: one.number
    )


def _latest(records: Mapping[int, GroupRecord]) -> Issued:
    return max((record.issued[-1] for record in records.values()), key=lambda one: one.number)


def _shown(one: Issued) -> str:
    return f"{one.name} (number {one.number}{', ' + one.place if one.place else ''})"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
