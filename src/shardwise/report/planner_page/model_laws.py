"""A model for the page: laws of its storages and operations, and the steps of all strategies.

Values that depend on the batch, the length of a sample and the device are laws; those that depend on the number of
devices are columns of numbers (column_table.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import InvalidModel
from shardwise.hardware import cluster_of
from shardwise.plan.mesh import Mesh
from shardwise.planner.job import Job
from shardwise.planner.memory.events import released_of_root
from shardwise.planner.memory.reserved import reserved_jobs
from shardwise.planner.search.candidates import SpecFor
from shardwise.planner.time.compute import COLUMN_BYTES, KERNELS, MOVED
from shardwise.planner.time.pieces import pieces_of
from shardwise.report.planner_page.page_plans import HOSTS, PAGE_PLAN, WAYS, page_job
from shardwise.report.planner_page.strategy_steps import strategy_steps
from shardwise.report.planner_page.value_tables import ValueTables
from shardwise.spec.law import Law
from shardwise.spec.step import BEFORE_FORWARD, Act, Op, StorageEvent, What
from shardwise.vocabulary.categories import CATEGORIES

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


def model_data(spec_for: SpecFor, *, name: str, longest: int | None) -> dict[str, Any]:
    """Return a model for JSON. `longest` is the longest sample that is offered; None if samples have no length.

    laws        [c₀, b₀], or all six terms of a law
    ops         [kernel, operation, law of FLOPs, of bytes, laws of dimensions, moved share, bytes per column]
    computes    lists of operations, by their numbers
    storages    lists of events, four numbers each: code, law, the owner of a gradient or the columns of a sum, and the
                number of the storage within its unit
    rows        of a shortened step and of the whole one: [trigger, unit, number of units that it stands for]
    ways        recompute → of both steps, the storages of each row and the computation (`_way`)
    saved       [unit, row of the whole step] of the units whose activations may wait in host memory
    cuts        the models that the allocator's model runs: all units, or two shortened models (`_cut`)
    strategies  choice for host memory → strategy → its steps (strategy_steps.py)
    """
    for way in WAYS:
        spec = spec_for(replace(PAGE_PLAN, recompute=way))
    if not spec.traces:
        raise InvalidModel(f"{name}: only its number of parameters is known, so the page has nothing to compute with")
    tables = ValueTables()
    mesh = Mesh(shard=8)
    jobs = {way: page_job(spec, mesh, recompute=way) for way in WAYS}
    whole = {way: page_job(spec, mesh, recompute=way, **HOSTS["all"]) for way in WAYS}
    rows = {"short": _rows(jobs["none"], tables), "whole": _rows(whole["none"], tables)}
    ways = {way: _way(jobs[way], whole[way], tables) for way in WAYS}
    cuts = [_cut(cut_jobs, tables) for cut_jobs in zip(*(reserved_jobs(job) for job in jobs.values()), strict=True)]
    strategies = strategy_steps(spec, cluster=cluster_of("8xh100-80gb"), tables=tables)
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
        "saved": _saved(whole["none"], tables),
        "cuts": cuts,
        "strategies": strategies,
        "triggers": tables.values("triggers"),
        "units": tables.values("units"),
        "names": tables.values("names"),
        "ops": [_op(op, tables) for op in tables.values("ops")],
        "computes": tables.values("computes"),
        "storages": tables.values("storages"),
        "laws": [_terms(law) for law in tables.values("laws")],
    }


def _rows(job: Job, tables: ValueTables) -> list[list[int]]:
    return [
        [
            tables.number("triggers", row.label.removesuffix(f" {row.unit}")),
            tables.number("units", row.unit),
            row.repeats,
        ]
        for row in job.memory_rows
    ]


def _way(job: Job, whole: Job, tables: ValueTables) -> dict[str, Any]:
    """Return one choice for recomputing, of a shortened step and of the whole one.

    shared   laws of what the root has made and all units save; in host memory it is there once (events.py)
    """
    shared = [tables.number("laws", law) for law in released_of_root(whole.memory_streams)]
    return {
        "short": {"storages": _stored(job, tables), **_computed(job, tables)},
        "whole": {"storages": _stored(whole, tables), **_computed(whole, tables)},
        "shared": shared,
    }


def _saved(whole: Job, tables: ValueTables) -> list[list[int]]:
    """Return the units that may keep activations in host memory, with the row of their forward, in its order."""
    found = {
        unit: number
        for number, ((trigger, unit, _), _) in enumerate(whole.streams)
        if trigger == BEFORE_FORWARD and unit in whole.saved_by_units
    }
    return [[tables.number("units", unit), number] for unit, number in found.items()]


def _stored(job: Job, tables: ValueTables) -> list[int]:
    """Return the storages of each row, by their numbers."""
    return [tables.number("storages", tuple(_events(stream.events, tables))) for _, stream in job.streams]


def _cut(jobs: Sequence[Job], tables: ValueTables) -> dict[str, Any]:
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


def _computed(job: Job, tables: ValueTables) -> dict[str, Any]:
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


def _events(events: Sequence[StorageEvent], tables: ValueTables) -> Iterator[int]:
    for event in events:
        law = tables.number("laws", event.num_bytes)
        if event.columns:
            yield from (_COLUMN_SUM, law, event.columns, -1)
        elif (event.what, event.act) in _CODES:
            owner = tables.number("units", event.owner) if event.owner else -1
            yield from (_CODES[event.what, event.act], law, owner, -1 if event.ordinal is None else event.ordinal)
        # Other events of gradients are left out: Shardwise's engine decides when gradients are freed.


def _op(op: Op, tables: ValueTables) -> list[Any]:
    kernel = KERNELS.get(op.name, op.name)
    laws = [tables.number("laws", law) for law in (op.num_flops, op.num_bytes)]
    dims = [tables.number("laws", dim) for dim in op.dims]
    return [kernel, op.name, *laws, dims, MOVED.get(op.name, 1.0), COLUMN_BYTES.get(kernel, 0)]


def _terms(law: Law) -> list[int]:
    c0, _, _, b0, _, _ = law.terms
    return [c0, b0] if law.terms == (c0, 0, 0, b0, 0, 0) else list(law.terms)
