"""Finds from the records of all ranks what happened: who stopped, before which operation, and who waits for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord

FAILED, STOPPED, DISAGREE = "failed", "stopped", "disagree"
WAITING, NO_RECORD, ENDED, REPLACED = "waiting", "no record", "ended", "replaced"
# The most certain first: ranks that fail, or issue different collectives, also seem to stop.
_ORDER = (FAILED, DISAGREE, STOPPED, NO_RECORD, WAITING, ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An event in one group, or (`group` is "") on one rank. `ranks`: the ranks that caused it, if known."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    text: str


def replaced(restarts: Iterable[tuple[int, str]]) -> list[Finding]:
    """Return a finding for each earlier start of the job, which one rank ended, and which left no records."""
    return [Finding(kind=REPLACED, group="", ranks=(rank,), text=text) for rank, text in restarts]


def verdict(records: Sequence[RankRecord]) -> list[Finding]:
    """Return a finding for each rank that failed and for each group, the most certain first."""
    by_rank = {record.rank: record for record in records}
    findings = []
    for record in records:
        if record.failed:
            state = f": {record.state}" if record.state else ""
            text = f"rank {record.rank} failed ({record.failed}){state}"
            findings.append(Finding(kind=FAILED, group="", ranks=(record.rank,), text=text))
    findings += [_of_group(name, by_rank) for name in dict.fromkeys(name for one in records for name in one.groups)]
    return sorted(findings, key=lambda finding: _ORDER.index(finding.kind))


def _of_group(name: str, by_rank: Mapping[int, RankRecord]) -> Finding:
    records = {rank: record.groups[name] for rank, record in by_rank.items() if name in record.groups}
    members = {rank for record in records.values() for rank in record.ranks} or set(by_rank)
    by_number = {rank: {one.number: one for one in record.issued} for rank, record in records.items()}
    different = _first_difference(by_number)
    if different is not None:
        text = _disagreement(different, by_number) + _by_program(name, different, records=by_rank.values())
        return Finding(kind=DISAGREE, group=name, ranks=(), text=text)
    # A member that has a record, but not of this group, never came to it.
    last = {rank: records[rank].issued[-1].number if rank in records else 0 for rank in sorted(members & set(by_rank))}
    behind = tuple(rank for rank, number in last.items() if number < max(last.values()))
    if behind:
        return Finding(kind=STOPPED, group=name, ranks=behind, text=_stop(last, records=records, by_rank=by_rank))
    running = sorted(rank for rank, record in records.items() if not record.issued[-1].ended)
    waited = ""
    if running:
        # The first one: those after it were issued ahead of time.
        not_ended = (one for record in records.values() for one in record.issued if not one.ended)
        waited = f"{_listed(running)} waited in {_shown(min(not_ended, key=lambda one: one.number))}"
    silent = tuple(sorted(members - set(by_rank)))
    if silent:
        text = f"{_listed(silent)} left no record: killed, stopped, or its machine is gone{_heard(silent, by_rank)}"
        return Finding(kind=NO_RECORD, group=name, ranks=silent, text=text + (f"; {waited}" if waited else ""))
    if waited:
        text = f"{waited}, which every rank has issued: look at the network or a device"
        return Finding(kind=WAITING, group=name, ranks=(), text=text)
    latest = max((record.issued[-1] for record in records.values()), key=lambda one: one.number)
    text = f"every rank has ended its last collective, {_shown(latest)}"
    return Finding(kind=ENDED, group=name, ranks=(), text=text)


def _stop(last: Mapping[int, int], *, records: Mapping[int, GroupRecord], by_rank: Mapping[int, RankRecord]) -> str:
    """Describe the ranks that stopped first, and the operation that they did not come to. `last`: rank → number."""
    lowest = min(last.values())
    slowest = [rank for rank, number in last.items() if number == lowest]
    waiting = [rank for rank, number in last.items() if number > lowest]
    issued = [one for record in records.values() for one in record.issued]
    missing = min((one for one in issued if one.number > lowest), key=lambda one: one.number)
    after = f" after {_shown(records[slowest[0]].issued[-1])}" if slowest[0] in records else ""
    states = {rank: by_rank[rank].state for rank in slowest}
    state = "".join(f"; rank {rank} was {text}" for rank, text in states.items() if text)
    return (
        f"{_listed(slowest)} stopped{after} and did not come to {_shown(missing)}; {_listed(waiting)} "
        f"{'wait' if len(waiting) > 1 else 'waits'} for it{state}"
    )


def _first_difference(by_number: Mapping[int, Mapping[int, Issued]]) -> int | None:
    """Return the first number under which two ranks issued different collectives. Their records overlap partly."""
    for number in sorted({number for issued in by_number.values() for number in issued}):
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
    """Describe what the step program has in the place where ranks differ."""
    for record in records:
        if name in record.groups and record.program.get(name):
            before = [one.name for one in record.groups[name].issued if one.number < number]
            expected = following(before, program=record.program[name])
            return f"; the step program has {expected} there" if expected else ""
    return ""


def following(issued: Sequence[str], *, program: Sequence[str]) -> str:
    """Return what comes after `issued` in a program that repeats, or "" if `issued` does not end anywhere in it.

    Of several places, the one preceded by the longest match counts. A unit of several dtypes issues one collective per
    dtype, all with the same name: these count as one.
    """
    done = [name for name, _ in groupby(one.partition(" of ")[0] for one in issued)]
    steps = [name for name, _ in groupby(program)]

    def num_matching(place: int) -> int:
        """Count how many names before this place equal the last ones issued."""
        past = (steps[(place - 1 - back) % len(steps)] for back in range(len(done)))
        return next((back for back, name in enumerate(past) if name != done[-1 - back]), len(done))

    best = max(range(len(steps)), key=num_matching, default=None)
    return steps[best] if best is not None and done and num_matching(best) else ""


def _heard(silent: Sequence[int], by_rank: Mapping[int, RankRecord]) -> str:
    """Describe where ranks without a record were last heard by the others."""
    heard = {rank: record.heard[rank] for record in by_rank.values() for rank in silent if rank in record.heard}
    return "".join(f"; rank {rank} was last heard at {standing}" for rank, standing in sorted(heard.items()))


def _shown(one: Issued) -> str:
    return f"{one.name} (number {one.number}{', ' + one.place if one.place else ''})"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
