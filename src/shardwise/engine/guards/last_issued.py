"""For a record of a rank whose job fails: what its runner has issued, and what its program says next."""

from shardwise.comm.rank_progress import BETWEEN_STEPS, PROGRESS
from shardwise.comm.record_writer import LastIssued
from shardwise.engine.core.runner import Runner
from shardwise.program import Kind


def last_issued(runner: Runner) -> LastIssued:
    """Only of what is there: the main thread may be stuck anywhere."""
    program: dict[str, list[str]] = {}
    buckets = runner.executor.buckets
    for operation in runner.cursor.program.operations():
        group = _GROUPS.get(operation.kind, "")
        if operation.kind is Kind.REDUCE and not buckets[operation.subject].sharded:
            group = "world"
        if group:
            program.setdefault(group, []).append(str(operation))
    # Until the first step is over the program is a guess.
    upcoming = runner.cursor.upcoming(restarts=PROGRESS.phase == BETWEEN_STEPS) if runner.learned else ()
    return LastIssued(
        issued=runner.flags.same_order.numbered(),
        program={group: tuple(names) for group, names in program.items()} if runner.learned else {},
        upcoming=tuple(map(str, upcoming)),
    )


# A collective → the group that it is issued in (comm/groups.py).
_GROUPS = {
    Kind.GATHER: "gather",
    Kind.TO_OWNERS: "gather",
    Kind.FROM_OWNERS: "gather",
    Kind.REDUCE: "reduce",
    Kind.REDUCE_SLICE: "replicate",
    Kind.REDUCE_FLAGS: "world",
    Kind.BROADCAST: "world",
}
