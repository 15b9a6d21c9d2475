"""Reads the values of `bench.json`, and checks the type and range of each, and that they are consistent.

Tables and the page rely on it.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.form import (
    Form,
    WrongForm,
    anything,
    each,
    number,
    one_of,
    optional,
    record,
    row,
    string,
    table,
    whole,
)
from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.base.vocabulary.span import QUEUES, Span
from shardwise.measure.bench.case_result import CaseResult, PredictedCase, UnitOutline
from shardwise.measure.bench.spread import Spread
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.profile.memory_ledger import MemoryLedger
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

_MOST_RANKS = 2**24
_COUNT = whole(least=0)
_AMOUNT = number(least=0)
# A training that diverged has numbers that JSON does not have: they are written as strings.
_ANY_NUMBER = Form(
    words="a number",
    fits=lambda value: (
        value in ("nan", "inf", "-inf")
        or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max)
    ),
    read=lambda value, path: float(value),
)
_SECONDS = number(least=0, most=1e9)
# Measured, and divided by.
_TOOK = number(least=1e-12, most=1e9)
_BYTES = table(_COUNT, keys=CATEGORIES)
_SPREAD = optional(record(values=each(_TOOK, least=1)).then(lambda values, path: Spread(**values)))

_PREDICTED = record(
    allocated_bytes=_COUNT,
    breakdown_bytes=_BYTES,
    entries=each(row(string, _BYTES)),
    step_seconds=optional(_TOOK),
    exposed_seconds=optional(_SECONDS),
    spans=each(row(one_of(QUEUES), string, _SECONDS, _SECONDS).then(lambda values, path: Span(*values))),
).then(lambda values, path: PredictedCase(**values))

_LEDGER = record(
    may_lack=("operations",),
    entries=each(row(string, _BYTES, optional(_COUNT)), least=1),
    at_rest=_BYTES,
    operations=each(row(string, _BYTES)),
).then(lambda values, path: MemoryLedger.from_data(values))

_UNIT = record(name=string, num_params=_COUNT, num_trained=_COUNT).then(lambda values, path: UnitOutline(**values))
_HAPPENING = row(string, string, _COUNT, _SECONDS, _COUNT).then(
    lambda values, path: Happening(**dict(zip(Happening.__slots__, values, strict=True)))
)
# Computed from other values, and written for readers of the file.
_DERIVED = ("exposed_seconds", "why_not_exposed")

CASE = record(
    may_lack=("why_not", "why_not_silent", "sent_bytes", "calls", "tape_seconds", *_DERIVED),
    engine=string,
    strategy=string,
    why_not=string,
    losses=each(_ANY_NUMBER),
    grad_norms=each(_ANY_NUMBER),
    param_norms=table(_ANY_NUMBER),
    dtypes=table(each(string)),
    step_seconds=_SPREAD,
    silent_seconds=_SPREAD,
    why_not_silent=string,
    first_step_seconds=_SPREAD,
    allocated_bytes=each(whole(least=1)),
    reserved_bytes=each(_COUNT),
    ledgers=each(_LEDGER),
    sent_bytes=optional(_COUNT),
    calls=table(_COUNT),
    units=each(_UNIT),
    buckets=table(each(string, least=1)),
    tape=each(_HAPPENING),
    tape_seconds=optional(_TOOK),
    exposed_seconds=optional(_SECONDS),
    why_not_exposed=string,
    predicted=optional(_PREDICTED),
).then(lambda values, path: CaseResult(**{name: value for name, value in values.items() if name not in _DERIVED}))

# Written by report/text/costs.scaling_data; values that the page does not show are not checked.
_SCALED = record(
    others=True,
    num_ranks=whole(least=1, most=_MOST_RANKS),
    efficiency=optional(_AMOUNT),
    strategy=string,
    mesh=record(replicate=whole(least=1, most=_MOST_RANKS), shard=whole(least=1, most=_MOST_RANKS)),
    micro_batch=_COUNT,
    peak_bytes=record(others=True, device=_COUNT),
    step_seconds=optional(_TOOK),
    samples_per_s=optional(_AMOUNT),
    exposed_comm_seconds=optional(_SECONDS),
)

_BENCH = record(
    format=_COUNT,
    name=string,
    command=string,
    made=string,
    num_ranks=whole(least=1, most=_MOST_RANKS),
    step_samples=_COUNT,
    step_tokens=optional(whole(least=1)),
    settings=table(anything),
    machine=table(anything),
    cases=each(CASE),
    equivalence=record(differences=each(record(case=string, text=string, excess=_ANY_NUMBER)), largest=_ANY_NUMBER),
    recommended=optional(_COUNT),
    why=string,
    capacity_bytes=optional(whole(least=1)),
    scaling=each(_SCALED),
)


def read_bench(data: Any) -> dict[str, Any]:
    """Return the values of a `Bench`, or raise `WrongForm`, with one line."""
    values: dict[str, Any] = _BENCH(data, "")
    for problem in _at_odds(values):
        raise WrongForm(problem)
    del values["format"]
    # With what the page does not show.
    return values | {"scaling": tuple(data["scaling"])}


def _at_odds(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is inconsistent between values."""
    cases: tuple[CaseResult, ...] = data["cases"]
    if data["recommended"] is not None:
        if data["recommended"] >= len(cases):
            yield f"case {data['recommended']} of {len(cases)} is recommended"
        elif not cases[data["recommended"]].ran:
            yield f"case {data['recommended']} is recommended, which did not run"
    # A bench that has just begun has no samples yet.
    if data["step_samples"] == 0 and any(case.ran for case in cases):
        yield "step_samples is 0, though cases ran"
    for index, case in enumerate(cases):
        for problem in _case_at_odds(case):
            yield f"cases[{index}]: {problem}"
    for index, scaled in enumerate(data["scaling"]):
        if scaled["step_seconds"] is not None and None in (scaled["efficiency"], scaled["samples_per_s"]):
            yield f"scaling[{index}] has a step time, but no throughput"
    try:
        found = data["settings"].get("plan.mesh")
        mesh = Plan.from_dict({"mesh": found}).mesh if found is not None else None
        (mesh or Mesh(shard=data["num_ranks"])).check_ranks(data["num_ranks"])
        Plan.from_dict({"overrides": data["settings"].get("plan.overrides") or {}})
    except ShardwiseError as error:
        yield f"settings: {error}"


def _case_at_odds(case: CaseResult) -> Iterator[str]:
    units = [unit.name for unit in case.units]
    if len(set(units)) < len(units):
        yield "two units have the same name"
    for name, members in case.buckets.items():
        unknown = [member for member in members if member not in units]
        if unknown:
            yield f"bucket {name!r} is of {unknown[0]!r}, which is no unit"
