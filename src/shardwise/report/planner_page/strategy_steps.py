"""The steps of all strategies for the page: their numbers for each number of devices, as columns (column_table.py)."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from shardwise.hardware import Cluster
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SHARDED, STRATEGIES
from shardwise.planner.job import Job
from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, MoveSaved, Recategorize
from shardwise.planner.memory.reserved import reserved_jobs
from shardwise.planner.time.step_time import timed_job
from shardwise.report.planner_page.column_table import NumberedStep, merged
from shardwise.report.planner_page.page_plans import DEVICE_COUNTS, HOSTS, PER_NODE, page_job, strategies_with
from shardwise.report.planner_page.priced_step import priced_step
from shardwise.report.planner_page.value_tables import ValueTables
from shardwise.spec import ModelSpec
from shardwise.vocabulary.categories import CATEGORIES

_CHANGE, _MOVE, _TAKE, _SAVED = range(4)


def strategy_steps(spec: ModelSpec, *, cluster: Cluster, tables: ValueTables) -> dict[str, dict[str, Any]]:
    """Return choice for host memory → strategy → its steps on one axis and on a mesh with two axes, in parts."""
    return {
        host: {name: _strategy(spec, name, host, cluster=cluster, tables=tables) for name in strategies_with(host)}
        for host in HOSTS
    }


def _strategy(spec: ModelSpec, strategy: str, host: str, *, cluster: Cluster, tables: ValueTables) -> dict[str, Any]:
    shards = STRATEGIES[strategy].optim is SHARDED
    counts = [count for count in DEVICE_COUNTS if host == "none" or count <= PER_NODE]
    slices = [count for count in counts if PER_NODE <= count < DEVICE_COUNTS[-1]] if shards and host == "none" else []

    def job_on(mesh: Mesh) -> Job:
        return page_job(spec, mesh, strategy=strategy, **HOSTS[host])

    flat = {count: job_on(Mesh(shard=count)) for count in counts}
    crossed = {count: job_on(Mesh(replicate=2, shard=count)) for count in slices}
    return {
        "shards": shards,
        "flat": _parts(flat, cluster=cluster, tables=tables),
        "crossed": _parts(crossed, cluster=cluster, tables=tables),
    }


def _parts(jobs: Mapping[int, Job], *, cluster: Cluster, tables: ValueTables) -> dict[str, list[dict[str, Any]]]:
    """Return the parts of the steps of jobs, by number of slices; each part has fewer forms than a whole step."""
    return {
        "time": merged({count: _time(job, cluster=cluster, tables=tables) for count, job in jobs.items()}),
        "memory": merged({count: _memory(job, tables) for count, job in jobs.items()}),
        "allocations": merged({count: _allocations(job, tables) for count, job in jobs.items()}),
    }


def _time(job: Job, *, cluster: Cluster, tables: ValueTables) -> NumberedStep:
    """Return the instructions, and the number of the last ones, as from priced_step.

    length  whether they are those of all units ("whole") or of a shortened step ("short")
    """
    timed, step = timed_job(job), NumberedStep()
    instructions, num_update = priced_step(timed, cluster=cluster, note=step.note, number=tables.number)
    step.form = {"length": _length(timed), "instructions": instructions, "num_update": num_update}
    return step


def _memory(job: Job, tables: ValueTables) -> NumberedStep:
    """Return what the replay of memory needs of a step.

    length         as in `_time`
    communicators  communicators of a process after the first
    at_rest        bytes by category, without the batch
    host           bytes of states in host memory
    changes        of each row: [0, category, bytes], [1, from category, to category, bytes], [2, unit] or [3, unit,
                   whether what it has saved leaves for host memory]
    """
    step = NumberedStep()
    step.form = {
        "length": _length(job),
        "communicators": job.num_communicators - 1,
        "at_rest": [step.note(line.const) for line in job.at_rest],
        "host": step.note(job.states_on_host),
        "changes": [_changes(row, step, tables) for row in job.memory_rows],
    }
    return step


def _length(job: Job) -> str:
    return "short" if job.short.weights else "whole"


def _allocations(job: Job, tables: ValueTables) -> NumberedStep:
    """Return the steps of the models that the allocator's model runs."""
    step = NumberedStep()
    step.form = {"cuts": [_cut_step(cut, step, tables) for cut in reserved_jobs(job)]}
    return step


def _cut_step(job: Job, step: NumberedStep, tables: ValueTables) -> dict[str, Any]:
    """Return the step of a shortened model.

    changes         of each row, as in `_memory`
    first_changes   [row, its changes] of the rows that differ in the first step
    first, moments  sizes of the allocations before the first step, and of those in its update: [number of units, sizes
                    of each], then those that belong to no unit
    """
    states = [(tuple(size for size in (*one.held, one.buffers) if size), one.moments) for one in job.states.values()]
    groups = [(key, len(list(group))) for key, group in groupby(states)]
    return {
        "changes": [_changes(row, step, tables) for row in job.memory_rows],
        "first_changes": [
            [index, _changes(row, step, tables)]
            for index, (row, later) in enumerate(zip(job.first_rows, job.memory_rows, strict=True))
            if row.changes != later.changes
        ],
        "first": [
            *([count, list(map(step.note, held))] for (held, _), count in groups),
            [1, [step.note(size) for size in job.buffers_at_rest() if size]],
        ],
        "moments": [[count, list(map(step.note, moments))] for (_, moments), count in groups],
    }


def _changes(row: MemoryRow, step: NumberedStep, tables: ValueTables) -> list[list[Any]]:
    return [noted for change in row.changes for noted in _change(change, step, tables)]


def _change(change: MemoryChange, step: NumberedStep, tables: ValueTables) -> Iterator[list[Any]]:
    """Yield a change as JSON; that of units that are left out is a separate one, with a 1 at its end."""
    if isinstance(change, Change):
        assert change.per_sample == 0
        category = CATEGORIES.index(change.category)
        if change.const:
            yield [_CHANGE, category, step.note(change.const)]
        if change.others:
            yield [_CHANGE, category, step.note(change.others), 1]
    elif isinstance(change, Recategorize):
        before, after = CATEGORIES.index(change.before), CATEGORIES.index(change.after)
        yield [_MOVE, before, after, step.note(change.num_bytes)]
        if change.others:
            yield [_CHANGE, before, step.note(-change.others), 1]
            yield [_CHANGE, after, step.note(change.others), 1]
    elif isinstance(change, MoveSaved):
        # How much depends on the batch and on the length of a sample.
        yield [_SAVED, tables.number("units", change.unit), int(change.to_host)]
    else:
        yield [_TAKE, tables.number("units", change.unit)]
