"""Runs cases on ranks, compares them with the oracle, and cuts a failing case down to a small one.

equal      all that was observed is what one process gives
refused    a ShardwiseError, the same event on all ranks; events that change no training are left out, and the rest
           is compared: a refusal leaves everything as it was
failed     a difference, any other error, a hang, a signal
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from compositions import Case, Event
from drawn_plans import NARROW, is_narrow
from one_process import OneProcess
from rank_world import Rank, Reference
from ranks import RankFailed, run_ranks
from simulated_graphs import simulated
from worlds import Observed, World

from shardwise.base.errors import ShardwiseError
from shardwise.comm.groups.agreement import exchange

# What an event returned, or the error that it raised.
Seen = Observed | Exception

TIMEOUT_SECONDS = 20.0
# Of a case whose units are graphs, in addition.
TRACING_SECONDS = 8.0
# Of float64 results, relative to the largest value of each tensor, as DESIGN has it for AdamW.
BOUND = 1e-10
# Where values are larger, training has diverged, and rounding with it.
DIVERGED = 1e8
# Of the norms of gradients, which are returned in fp32 and depend on the order in which slices are added up.
NORM_BOUND = 1e-6
# An error inside of these ends the training; after one in any other event it continues.
_TRAINING = ("step", "drop a forward", "grad norms", "evaluate", "fail")


# Of a part, one after the other.
_SIMPLER: tuple[dict[str, Any], ...] = (
    {"uses": "once"},
    {"frozen": "nothing"},
    {"tied": False},
    {"hooked": "nothing"},
    {"checkpointed": False},
    {"kind": "square"},
)
_END = Event(kind="end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`kind`: equal, refused or failed. `at`: the event; -1 is prepare, the number of events the end.

    replayed   steps, or calls of units, that were replays of graphs
    """

    kind: str
    at: int = 0
    line: str = ""
    replayed: int = field(default=0, compare=False)


def run_case(rank: int, case: Case) -> Outcome:
    """The body of a rank: the case in a job, then in its oracle, compared event by event.

    Events that were refused are left out of the oracle; what torch itself refuses is right.
    """
    num_ranks, device = dist.get_world_size(), torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        with simulated(at_once=True) if case.graphs and device.type == "cpu" else nullcontext():
            world = Rank(case, num_ranks=num_ranks, device=device)
            observed = _run(world, case)
    except ShardwiseError as error:
        return Outcome(kind="refused", at=-1, line=str(error))
    refused = [isinstance(found, ShardwiseError) for found in observed]
    oracle: World
    if is_narrow(dict(case.plan)):
        everyone = exchange(refused)
        if any(other != refused for other in everyone):
            said = "; ".join(f"rank {rank}: {str(found)[:150]}" for found in observed if isinstance(found, Exception))
            return Outcome(kind="failed", line=f"ranks differ: {said or 'this one refused nothing'}")
        oracle = Reference(case, num_ranks=num_ranks, device=device)
    else:
        oracle = OneProcess(case, num_ranks=num_ranks, rank=rank, device=device)
    found = compare(case, observed, _run(oracle, case, skipped=refused))
    return replace(found, replayed=world.replayed())


def _run(world: World, case: Case, *, skipped: Sequence[bool] | None = None) -> list[Seen]:
    """Run the events, up to an error that ends the training. `skipped`: those to leave out; later ones do not run."""
    observed: list[Seen] = []
    for event, skips in zip((*case.events, _END), skipped or repeat(False), strict=False):
        try:
            observed.append({} if skips else world.do(event))
        except Exception as error:
            observed.append(error)
            if event.kind in _TRAINING or not isinstance(error, ShardwiseError):
                break
    return observed


def compare(case: Case, observed: list[Seen], expected: list[Seen]) -> Outcome:
    """Compare what was observed with the oracle's. An error that is not ours is right if torch raises one too."""
    refused: Outcome | None = None
    for at, (event, found, right) in enumerate(zip((*case.events, _END), observed, expected, strict=False)):
        if isinstance(found, ShardwiseError):
            refused = refused or Outcome(kind="refused", at=at, line=f"{event}: {found}")
            continue
        if isinstance(right, RuntimeError):
            if isinstance(found, RuntimeError):
                return refused or Outcome(kind="equal")
            return Outcome(kind="failed", at=at, line=f"{event}: torch itself raises {str(right)[:150]}")
        for error in (found, right):
            if isinstance(error, Exception):
                raise error
        for label in sorted(right.keys() | found.keys()):
            bound = NORM_BOUND if label == "norms" else BOUND if case.double else 0.0
            said = difference(found.get(label), right.get(label), bound=bound)
            if said:
                return Outcome(kind="failed", at=at, line=f"{event} differs in {label}: {said}")
    return refused or Outcome(kind="equal")


def difference(found: Any, expected: Any, *, bound: float) -> str:
    """Describe how two values differ; "" if they are equal, or within the bound relative to the largest."""
    if isinstance(expected, dict):
        names = (name for name in expected.keys() | found.keys())
        each = ((name, difference(found.get(name), expected.get(name), bound=bound)) for name in sorted(names))
        return next((f"{name}: {said}" for name, said in each if said), "")
    if (found is None) != (expected is None):
        return f"{found} instead of {expected}"
    ours, theirs = (
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in (found, expected)
    )
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    # A training that diverges is to diverge in the same way.
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if not differs.any():
        return ""
    largest = (ours.double() - theirs.double())[differs].abs().max().item()
    finite = theirs.double()[theirs.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, 1e-3)
    is_within = bound and (largest <= bound * scale or scale > DIVERGED)
    return "" if is_within else f"off by {largest:.3g} of {scale:.3g}"


def run_cases(rank: int, cases: Sequence[Case]) -> list[Outcome]:
    """The body of a rank for several cases, one after the other."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            found.append(run_case(rank, case))
            if any("compile" in plan for plan in case.plans()):
                # Otherwise later cases run into the number of times that one function may be compiled.
                torch._dynamo.reset()
            gc.collect()
    return found


def outcomes(cases: Sequence[Case], *, num_ranks: int, chunk: int = 25) -> Iterator[tuple[Case, Outcome]]:
    """Yield each case with its outcome. Cases share a job; where one fails in it, those of its chunk run one by one."""
    for start in range(0, len(cases), chunk):
        part = cases[start : start + chunk]
        limit_seconds = TIMEOUT_SECONDS * 2 + TRACING_SECONDS * sum(case.graphs for case in part)
        try:
            rows = run_ranks(run_cases, num_ranks=num_ranks, args=(part,), timeout_seconds=limit_seconds)
        except RankFailed:
            yield from ((case, outcome(case, num_ranks=num_ranks)) for case in part)
            continue
        yield from zip(part, (agreed(row) for row in zip(*rows, strict=True)), strict=True)


def outcome(case: Case, *, num_ranks: int) -> Outcome:
    """Return the outcome of one case, in a job of its own if it fails."""
    limit_seconds = TIMEOUT_SECONDS * (2 if case.graphs else 1)
    try:
        rows = run_ranks(run_cases, num_ranks=num_ranks, args=([case],), timeout_seconds=limit_seconds)
    except RankFailed as error:
        text = str(error).split("\n---")[0]
        # The last line of a traceback that is not indented.
        said = [line for line in text.splitlines() if line and line[0] not in " ^"]
        return Outcome(kind="failed", at=-2, line=said[-1][:300])
    return agreed([row[0] for row in rows])


def agreed(ranks: Sequence[Outcome]) -> Outcome:
    """Return the outcome of all ranks: a failure if any failed, or if they were refused at different events."""
    failed = [one for one in ranks if one.kind == "failed"]
    if failed:
        return failed[0]
    if len({(one.kind, one.at) for one in ranks}) > 1:
        said = "; ".join(f"rank {rank} {one.kind} at {one.at} {one.line}" for rank, one in enumerate(ranks))
        return Outcome(kind="failed", at=ranks[0].at, line=f"ranks differ: {said}")
    return ranks[0]


def cut_down(case: Case, *, num_ranks: int, most: int = 200) -> tuple[Case, Outcome]:
    """Return a smaller case that still fails: without events, parts, keys of the plan and settings that do not matter."""
    found = outcome(case, num_ranks=num_ranks)
    tries = 0
    smaller = True
    while smaller and tries < most:
        smaller = False
        for candidate in simpler(case):
            tries += 1
            result = outcome(candidate, num_ranks=num_ranks)
            if result.kind == "failed" and _way(result) == _way(found):
                case, found, smaller = candidate, result, True
                break
    return case, found


def _way(found: Outcome) -> str:
    """Return in which way a case failed: a hang, a difference, or the name of an error."""
    return next(
        (word for word in ("did not come back", "differs", "ranks differ") if word in found.line), found.line[:25]
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less."""
    for at in range(len(case.events)):
        if len(case.events) > 1:
            yield replace(case, events=(*case.events[:at], *case.events[at + 1 :]))
    for at in range(len(case.parts)):
        touched = [event for event in case.events if event.settings.get("part", -1) >= at]
        tied = at == 0 and any(part.tied for part in case.parts)
        if len(case.parts) > 1 and not touched and not tied:
            yield replace(case, parts=(*case.parts[:at], *case.parts[at + 1 :]))
    for name in case.plan:
        # What is computed stays as it is under all plans of a case.
        if name not in ("strategy", *NARROW):
            yield replace(case, plan={key: value for key, value in case.plan.items() if key != name})
    for at, event in enumerate(case.events):
        for name in event.settings:
            if event.kind == "step":
                left = {key: value for key, value in event.settings.items() if key != name}
                yield _with_event(case, at, replace(event, settings=left))
            elif name == "plan":
                for key in event.settings["plan"]:
                    if key not in ("strategy", *NARROW):
                        plan = {k: v for k, v in event.settings["plan"].items() if k != key}
                        yield _with_event(case, at, replace(event, settings={**event.settings, "plan": plan}))
    for at, part in enumerate(case.parts):
        for change in _SIMPLER:
            simple = replace(part, **change)
            if simple != part:
                yield replace(case, parts=(*case.parts[:at], simple, *case.parts[at + 1 :]))
    if len(case.other_parts) > 1:
        yield replace(case, other_parts=case.other_parts[:1])
    if len(case.other_plan) > 1:
        yield replace(case, other_plan={"strategy": case.other_plan["strategy"]})
    if case.graphs:
        yield replace(case, graphs=False)
    if case.late:
        yield replace(case, late=False)
    if case.optimizer != "sgd":
        yield replace(case, optimizer="sgd")


def _with_event(case: Case, at: int, event: Event) -> Case:
    return replace(case, events=(*case.events[:at], event, *case.events[at + 1 :]))
