"""What the checks against silent mistakes cost: their share of an eager training step.

    PYTHONPATH=src python benchmarks/check_cost.py --case cpu                    all cases of a device, or one by name
    PYTHONPATH=src python benchmarks/check_cost.py --case cpu --out benchmarks/results/check_cost.json

One process holds one model and runs blocks of steps in turn, with the checks and without: on, off, off, on … "Without"
means that the functions in CHECKS do nothing. The share is the ratio of neighbouring blocks, less 1: its median, and
its 95% interval (bootstrap). In a third kind of block each check's own calls are timed: that share is exact where the
ratio of blocks is lost in the machine's noise, but knows nothing of what a check costs elsewhere (a cache, a branch).
The goal is met if the time inside is below 1% and the ratio does not contradict it.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_step import CASES as STEP_CASES
from engine_step import WARM_UP_STEPS, Case, make_step, on_ranks_of
from measuring import circumstances, settle, spread, write_part

from shardwise.engine.engine import engine_of
from shardwise.engine.guards import guard
from shardwise.engine.guards.guard import wake
from shardwise.engine.guards.managed import ManagedParameters
from shardwise.engine.guards.written import Writes
from shardwise.engine.optimizer import owned

GOAL = 0.01
ROUNDS_PER_TIMED = 8
# A case ends early on a machine that others use too.
MOST_SECONDS = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One function that looks for mistakes: where the engine finds it, and what does its work without looking."""

    owner: Any
    attribute: str
    off: Callable[..., Any] = lambda *_, **__: None


# name → all its functions. Whoever adds a check that runs in every step adds it here.
CHECKS: dict[str, tuple[Check, ...]] = {
    "parameters added or torn out": (Check(owner=ManagedParameters, attribute="check"),),
    "writes outside of an update": (
        Check(owner=Writes, attribute="before_step"),
        Check(owner=Writes, attribute="settled"),
    ),
    "reads of freed parameters": (
        Check(owner=guard, attribute="rest"),
        Check(owner=guard, attribute="wake"),
    ),
    "torch's GradScaler": (Check(owner=owned, attribute="called_by_torchs", off=lambda: False),),
}

# The function itself, also while its calls are timed.
_SETTLED = Writes.settled

_HOST = replace(STEP_CASES["ddp-host"], clips=False, steps_per_block=1, rounds=400)
_LARGER = replace(STEP_CASES["ddp-larger"], num_ranks=1, steps_per_block=1, rounds=80)
_GPT2 = replace(STEP_CASES["gpt2-124m"], steps_per_block=2, rounds=200)
_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
# Host-bound: 24 blocks with hardly anything to compute. Where a device has work to do, the host's time matters less.
CASES: dict[str, Case] = {
    **{f"cpu-host-{name}": replace(_HOST, strategy=name) for name in _STRATEGIES},
    **{f"cpu-larger-{name}": replace(_LARGER, strategy=name) for name in _STRATEGIES},
    **{f"cuda-host-{name}": replace(_HOST, strategy=name, device="cuda") for name in _STRATEGIES},
    **{f"cuda-124m-{name}": replace(_GPT2, strategy=name) for name in _STRATEGIES},
}


@contextmanager
def without_checks(model: torch.nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for check in (check for checks in CHECKS.values() for check in checks):
            stack.enter_context(patch.object(check.owner, check.attribute, check.off))
        # Those at rest would refuse the next forward, which no longer wakes them; nor does an update wake slices.
        wake(model.parameters())
        wake(part.parameter for flat in engine_of(model).core.flats for part in flat.master.owned)
        yield
    # What was updated meanwhile was not written by anybody else.
    _SETTLED(engine_of(model).guards.managed.writes)


@contextmanager
def timed_checks(seconds: dict[str, float]) -> Iterator[None]:
    """Each check adds its time to its own entry."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    with ExitStack() as stack:
        for name, check in ((name, check) for name, checks in CHECKS.items() for check in checks):
            function = timed(name, getattr(check.owner, check.attribute))
            stack.enter_context(patch.object(check.owner, check.attribute, function))
        yield


def measured(rank: int, case: Case) -> dict[str, Any]:
    """Return the seconds per step of each block with and without checks, and of the checks themselves."""
    models: list[torch.nn.Module] = []
    step = make_step(case, engine="shardwise", rank=rank, arrange=lambda model, plan: models.append(model) or plan)
    for _ in range(2 * WARM_UP_STEPS):
        step()
    clock = time.perf_counter if case.device == "cuda" else time.process_time
    block = partial(_block_seconds, step, num_steps=case.steps_per_block, clock=clock)
    found: dict[str, Any] = {"on": [], "off": [], "inside": {name: [] for name in CHECKS}}
    gc.disable()
    deadline = time.monotonic() + MOST_SECONDS
    for number in range(case.rounds):
        if time.monotonic() > deadline and number > ROUNDS_PER_TIMED:
            break
        for kind in ("on", "off") if number % 2 == 0 else ("off", "on"):
            with without_checks(models[0]) if kind == "off" else ExitStack():
                found[kind].append(block())
        if number % ROUNDS_PER_TIMED == 0:
            seconds = dict.fromkeys(CHECKS, 0.0)
            with timed_checks(seconds):
                whole = block(clock=time.perf_counter)
            for name, value in seconds.items():
                found["inside"][name].append(value / case.steps_per_block / whole)
            gc.collect()
    gc.enable()
    return found


def _block_seconds(step: Callable[[], Any], *, num_steps: int, clock: Callable[[], float]) -> float:
    settle()
    started = clock()
    for _ in range(num_steps):
        step()
    settle()
    return (clock() - started) / num_steps


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Shares of a step: of all checks by the ratio of blocks, of each by its own time."""
    ratios = [on / off - 1 for on, off in zip(found["on"], found["off"], strict=True)]
    sums = [sum(values) for values in zip(*found["inside"].values(), strict=True)]
    return {
        "rounds": len(ratios),
        "step_seconds": spread(found["on"]),
        "share_by_blocks": {**spread(ratios), **interval_of_median(ratios)},
        "share_inside": spread(sums),
        "inside_by_check": {name: spread(values)["median"] for name, values in found["inside"].items()},
    }


def interval_of_median(values: list[float]) -> dict[str, float]:
    """Where 95% of the medians lie of as many values, drawn again from these."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return {"low": medians[25], "high": medians[974]}


def report(name: str, result: dict[str, Any]) -> None:
    blocks, inside = result["share_by_blocks"], result["share_inside"]
    met = blocks["low"] < GOAL and inside["median"] < GOAL
    parts = ", ".join(f"{check} {share:.2%}" for check, share in result["inside_by_check"].items())
    print(
        f"{name:18} step {1000 * result['step_seconds']['median']:7.2f} ms  on / off {blocks['median']:+.2%} "
        f"[{blocks['low']:+.2%}, {blocks['high']:+.2%}]  inside {inside['median']:.2%} "
        f"[{inside['q1']:.2%}, {inside['q3']:.2%}]  goal < {GOAL:.0%}: {'met' if met else 'missed'}\n{'':18} {parts}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=[*CASES, "cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {**circumstances(), "goal": GOAL, "cases": {}}
    for name, case in CASES.items():
        if options.case in (name, case.device):
            (rank_0,) = on_ranks_of(measured, case)
            result = summary(rank_0)
            report(name, result)
            results["cases"][name] = {"case": asdict(case), **result}
    write_part(options.out, CASES[options.case].device if options.case in CASES else options.case, results)


if __name__ == "__main__":
    main()
