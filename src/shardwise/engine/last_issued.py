"""Describes the collectives that an engine has issued, and those that come next, for the record of a failed job."""

from shardwise.comm.groups.rank_progress import BETWEEN_STEPS, PROGRESS
from shardwise.comm.watch.record_writer import RECORDS, LastIssued
from shardwise.engine.engine import EngineParts
from shardwise.program import Kind


def write_records_of(engine: EngineParts) -> None:
    """Include the collectives of this engine in the record that a failing job leaves."""
    RECORDS.describe(engine, groups=engine.core.setting.groups, last=last_issued)


def last_issued(engine: EngineParts) -> LastIssued:
    """Return the collectives issued and upcoming. Only reads: the main thread may be stuck anywhere."""
    core = engine.core
    groups = engine.core.setting.groups.by_name()
    program: dict[str, list[str]] = {}
    for operation in core.cursor.program.operations():
        group = _GROUPS.get(operation.kind, "")
        if operation.kind is Kind.REDUCE and not core.executor.buckets[operation.subject].sharded:
            group = "reduce_world" if "reduce_world" in groups else "reduce"
        if group:
            program.setdefault(group, []).append(str(operation))
    # Until the first step is over the program is a guess.
    upcoming = core.cursor.upcoming(restarts=PROGRESS.phase == BETWEEN_STEPS) if core.followed.learned else ()
    return LastIssued(
        issued=engine.guards.same_order.numbered(),
        program={group: tuple(names) for group, names in program.items()} if core.followed.learned else {},
        upcoming=tuple(map(str, upcoming)),
    )


# A collective → the group that it is issued in (comm/groups/groups.py).
_GROUPS = {
    Kind.GATHER: "gather",
    Kind.TO_OWNERS: "gather",
    Kind.FROM_OWNERS: "gather",
    Kind.REDUCE: "reduce",
    Kind.REDUCE_SLICE: "replicate",
    Kind.GATHER_SLICE: "replicate",
    Kind.REDUCE_FLAGS: "world",
    Kind.BROADCAST: "world",
    Kind.GATHER_SCALES: "gather",
}
