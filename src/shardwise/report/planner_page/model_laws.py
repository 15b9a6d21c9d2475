"""A model for the page: laws of its storages and operations, and the steps of all strategies.

Values that depend on the batch, the length of a sample and the device are laws; those that depend on the number of
devices are columns of numbers (column_table.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from shardwise.errors import InvalidModel
from shardwise.hardware import Cluster, cluster_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SHARDED, STRATEGIES
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import job_of
from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, Recategorize
from shardwise.planner.memory.reserved import reserved_jobs
from shardwise.planner.search.candidates import SpecFor
from shardwise.planner.time.compute import COLUMN_BYTES, KERNELS, MOVED
from shardwise.planner.time.pieces import pieces_of
from shardwise.planner.time.step_time import timed_job
from shardwise.report.planner_page.column_table import NumberedStep, merged
from shardwise.report.planner_page.priced_step import priced_step
from shardwise.spec import ModelSpec
from shardwise.spec.law import Law
from shardwise.spec.step import Act, Op, StorageEvent, What
from shardwise.vocabulary.categories import CATEGORIES

WAYS = ("none", "selective", "full")
"""The choices for recomputing activations."""

PER_NODE = 8
DEVICE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
"""The numbers of devices that the page offers: one node of up to 8, or several nodes of 8."""

PAGE_PLAN = Plan(precision="bf16")
"""The settings that the page does not change. The optimizer is AdamW."""

_CHANGE, _MOVE, _TAKE = range(3)
# Codes of storage events; memory.js has the same list.
_CODES = {
    (What.ACTIVATION, Act.BORN): 0,
    (What.ACTIVATION, Act.DIED): 1,
    (What.WEIGHT_COPY, Act.BORN): 2,
    (What.WEIGHT_COPY, Act.DIED): 3,
    (What.GRADIENT, Act.BORN): 4,
    (What.SCRATCH, Act.BORN): 5,
}
_COLUMN_SUM = 6


class _Tables:
    """Tables of distinct values, which are referred to by number."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[Any, int]] = {}

    def number(self, table: str, value: Any) -> int:
        known = self._tables.setdefault(table, {})
        return known.setdefault(value, len(known))

    def values(self, table: str) -> list[Any]:
        return list(self._tables.get(table, {}))


def model_data(spec_for: SpecFor, *, name: str, longest: int | None) -> dict[str, Any]:
    """Return a model for JSON. `longest` is the longest sample that is offered; None if samples have no length.

    laws        [c₀, b₀], or all six terms of a law
    ops         [kernel, operation, law of FLOPs, of bytes, laws of dimensions, moved share, bytes per column]
    computes    lists of operations, by their numbers
    storages    lists of events, four numbers each: code, law, the owner of a gradient or the columns of a sum, and the
                number of the storage within its unit
    rows        [label, unit, number of units that it stands for]: the rows of a shortened step
    ways        recompute → the storages of each row, and the computation (`_computed`)
    cuts        the models that the allocator's model runs: all units, or two shortened models (`_cut`)
    strategies  name → its steps, on one axis and on a mesh with two axes (`_step`)
    """
    for way in WAYS:
        spec = spec_for(replace(PAGE_PLAN, recompute=way))
    if not spec.traces:
        raise InvalidModel(f"{name}: only its number of parameters is known, so the page has nothing to compute with")
    tables = _Tables()
    cluster = cluster_of("8xh100-80gb")
    jobs = {way: _job(spec, Plan(strategy="fsdp", precision="bf16", recompute=way), Mesh(shard=8)) for way in WAYS}
    rows = [[row.label, tables.number("units", row.unit), row.repeats] for row in jobs["none"].memory_rows]
    ways = {way: _way(job, tables) for way, job in jobs.items()}
    cuts = [_cut(cut_jobs, tables) for cut_jobs in zip(*(reserved_jobs(job) for job in jobs.values()), strict=True)]
    strategies = {strategy: _strategy(spec, strategy, cluster=cluster, tables=tables) for strategy in STRATEGIES}
    return {
        "name": name,
        "num_params": spec.num_params,
        "num_units": len(spec.units),
        "seq": spec.seq,
        "longest": longest,
        "categories": list(CATEGORIES),
        "batch_bytes": _terms(spec.batch_bytes or Law((0, 0, 0, 0, 0, 0))),
        "rows": rows,
        "ways": ways,
        "cuts": cuts,
        "strategies": strategies,
        "units": tables.values("units"),
        "names": tables.values("names"),
        "ops": [_op(op, tables) for op in tables.values("ops")],
        "computes": tables.values("computes"),
        "storages": tables.values("storages"),
        "laws": [_terms(law) for law in tables.values("laws")],
    }


def _job(spec: ModelSpec, plan: Plan, mesh: Mesh) -> Job:
    return job_of(spec, plan=replace(plan, mesh=mesh), num_ranks=mesh.num_ranks, optimizer="adamw", device="cuda")


def _way(job: Job, tables: _Tables) -> dict[str, Any]:
    """Return one choice for recomputing: the storages of each row, and what a shortened and a complete step compute."""
    complete = timed_job(_job(job.spec, replace(job.plan, strategy="ddp"), Mesh(shard=8)))
    return {
        "storages": _stored(job, tables),
        "short": _computed(job, tables),
        "whole": _computed(complete, tables),
    }


def _stored(job: Job, tables: _Tables) -> list[int]:
    """Return the storages of each row, by their numbers."""
    return [tables.number("storages", tuple(_events(stream.events, tables))) for _, stream in job.streams]


def _cut(jobs: Sequence[Job], tables: _Tables) -> dict[str, Any]:
    """Return a shortened model: the unit of each row, the row of the update, and recompute → the storages of each row.

    `jobs` has one job for each of WAYS.
    """
    rows = jobs[0].memory_rows
    return {
        "num_units": len(jobs[0].short.spec.units),
        "rows": [tables.number("units", row.unit) for row in rows],
        "update": next(index for index, row in enumerate(rows) if row.label.startswith("after step")),
        "ways": {way: _stored(job, tables) for way, job in zip(WAYS, jobs, strict=True)},
    }


def _computed(job: Job, tables: _Tables) -> dict[str, Any]:
    """Return pieces: [list of operations, whether backward, recomputed ones at its start, units that it stands for]."""
    pieces = pieces_of(job)
    return {
        "nodes_per_op": pieces[0].nodes_per_op if pieces else 1.0,
        "pieces": [
            [
                tables.number("computes", tuple(tables.number("ops", op) for op in piece.stream.ops)),
                int(piece.is_backward),
                piece.recomputed,
                piece.num_units,
            ]
            for piece in pieces
        ],
    }


def _events(events: Sequence[StorageEvent], tables: _Tables) -> Iterator[int]:
    for event in events:
        law = tables.number("laws", event.num_bytes)
        if event.columns:
            yield from (_COLUMN_SUM, law, event.columns, -1)
        elif (event.what, event.act) in _CODES:
            owner = tables.number("units", event.owner) if event.owner else -1
            yield from (_CODES[event.what, event.act], law, owner, -1 if event.ordinal is None else event.ordinal)
        # Other events of gradients are left out: Shardwise's engine decides when gradients are freed.


def _op(op: Op, tables: _Tables) -> list[Any]:
    kernel = KERNELS.get(op.name, op.name)
    laws = [tables.number("laws", law) for law in (op.num_flops, op.num_bytes)]
    dims = [tables.number("laws", dim) for dim in op.dims]
    return [kernel, op.name, *laws, dims, MOVED.get(op.name, 1.0), COLUMN_BYTES.get(kernel, 0)]


def _terms(law: Law) -> list[int]:
    c0, _, _, b0, _, _ = law.terms
    return [c0, b0] if law.terms == (c0, 0, 0, b0, 0, 0) else list(law.terms)


def _strategy(spec: ModelSpec, strategy: str, *, cluster: Cluster, tables: _Tables) -> dict[str, Any]:
    plan = replace(PAGE_PLAN, strategy=strategy)
    shards = STRATEGIES[strategy].optim is SHARDED
    counts = [count for count in DEVICE_COUNTS if PER_NODE <= count < DEVICE_COUNTS[-1]] if shards else []
    flat = {count: _step(spec, plan, Mesh(shard=count), cluster=cluster, tables=tables) for count in DEVICE_COUNTS}
    crossed = {
        count: _step(spec, plan, Mesh(replicate=2, shard=count), cluster=cluster, tables=tables) for count in counts
    }
    return {"shards": shards, "flat": merged(flat), "crossed": merged(crossed)}


def _step(spec: ModelSpec, plan: Plan, mesh: Mesh, *, cluster: Cluster, tables: _Tables) -> NumberedStep:
    """Return the step of one strategy on one mesh.

    is_whole       whether all units are timed, or those of a shortened step
    communicators  communicators of a process after the first
    at_rest        bytes by category, without the batch
    changes        of each row: [0, category, bytes], [1, from category, to category, bytes] or [2, unit]
    cuts           of each shortened model: its `changes` and the allocations of the first step (`_cut_step`)
    instructions, num_update    as from priced_step
    """
    job = _job(spec, plan, mesh)
    timed = timed_job(job)
    step = NumberedStep()
    instructions, num_update = priced_step(timed, cluster=cluster, note=step.note)
    for row in instructions:
        row[1] = tables.number("names", row[1])
    step.form = {
        "is_whole": timed is not job,
        "communicators": job.num_communicators - 1,
        "at_rest": [step.note(line.const) for line in job.at_rest],
        "changes": [_changes(row, step, tables) for row in job.memory_rows],
        "cuts": [_cut_step(cut, step, tables) for cut in reserved_jobs(job)],
        "instructions": instructions,
        "num_update": num_update,
    }
    return step


def _cut_step(job: Job, step: NumberedStep, tables: _Tables) -> dict[str, Any]:
    """Return the step of a shortened model.

    changes         of each row, as in `_step`
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


def _changes(row: MemoryRow, step: NumberedStep, tables: _Tables) -> list[list[Any]]:
    return [noted for change in row.changes for noted in _change(change, step, tables)]


def _change(change: MemoryChange, step: NumberedStep, tables: _Tables) -> Iterator[list[Any]]:
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
    else:
        yield [_TAKE, tables.number("units", change.unit)]
