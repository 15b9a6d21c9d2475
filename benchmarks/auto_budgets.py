"""Auto plans against fixed ones within memory budgets, on one GPU.

    python benchmarks/auto_budgets.py solve    plans.json     chooses the plans; needs no GPU
    python benchmarks/auto_budgets.py measure  plans.json     runs them; writes results/auto_budgets_h200.json
    … measure plans.json --kinds auto --append                some of them; the rows of the others stay
    python benchmarks/auto_budgets.py table    FILE.json      the table of docs/measured-speed.md, as measured

For each model the budget is 40, 60 and 80% of what it is predicted to need at a reference batch if nothing is
recomputed. Within it run:

    auto        the solver's plan with compile = "auto": it may have units compiled
    best        of the fixed plans (strategy × recompute, each at the largest micro-batch that fits) the three that are
                predicted to be fastest; without compiled units, as they are by default
    random      two other fixed plans
    accelerate  of Hugging Face models, what Accelerate's FSDP2 does by default with gradient checkpointing, at the
                largest micro-batch that is predicted to fit

Units of ours are CUDA graphs, as by default. On one NCCL rank sharding frees next
to nothing, so what there is to choose is recompute, micro-batch and compiled units. Llama-8B is rehearsed as rank 0 of
8 and of 64 without the others, and solved for links that cost nothing, since a rehearsal has none. Weights are random;
bf16, fused AdamW.

    samples_per_s    the median of steps that follow on each other, after warm-up
    device_bytes     the peak of what is reserved, and what else is in use on the device: context, communicators

Auto plans and Accelerate run in a process each; for auto plans the budget is a limit of the allocator. All others of
one model share a process and have the whole device: of these only the speed counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from budget_plans import BATCHES, solve, task_of
from hugging_face_peers import on_accelerate
from measuring import (
    RESULTS,
    circumstances,
    free,
    join_alone,
    one_line,
    peaks,
    seconds_per_step,
    used_bytes,
    write,
)
from torch import Tensor
from torch.utils._pytree import tree_map_only
from workers import results_of
from workers import tell as hand_over

import shardwise
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.models.tasks import Task
from shardwise.plan import Plan

_SECONDS, _MOST_STEPS = 0.8, 12
# Until units are replayed.
_WARM_UP = 6
KINDS = {"fixed": ("best", "random"), "accelerate": ("accelerate",)}
ALONE = ("auto", "accelerate")
_POINT = ("model", "num_ranks", "share")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One plan, on this GPU."""
    plan = Plan.from_dict(case["plan"])
    assert plan.micro_batch is not None
    num_ranks = case["num_ranks"]
    if case["kind"] == "auto":
        left = case["budget_bytes"] - case["predicted_outside_bytes"]
        torch.cuda.set_per_process_memory_fraction(left / torch.cuda.get_device_properties(0).total_memory)
    if num_ranks == 1:
        _join(case["kind"])
    with absent_group(num_ranks) if num_ranks > 1 else nullcontext():
        # Ours fills it straight into shards.
        task = task_of(case["model"], device="cuda" if case["kind"] == "accelerate" else "meta")
        prepare = _on_accelerate if case["kind"] == "accelerate" else _on_ours
        step = prepare(task, plan, num_ranks=num_ranks)
        # What was there before it was prepared.
        free()
        batch = tree_map_only(Tensor, _drawn, task.make_batch(plan.micro_batch))
        seconds = _timed(lambda: step(batch))
    found = peaks()
    outside = used_bytes() - torch.cuda.memory_reserved()
    return {
        "samples_per_s": plan.micro_batch * num_ranks / seconds,
        "device_bytes": found["reserved_bytes"] + outside,
        **found,
    }


def _join(kind: str) -> None:
    """A job of one rank. Our communicators are made when they are first used, as in `shardwise train`."""
    if dist.is_initialized():
        return
    if kind == "accelerate":
        join_alone("cuda")
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())


def _on_ours(task: Task, plan: Plan, *, num_ranks: int) -> Callable[[Any], object]:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
    collectives = AbsentCollectives() if num_ranks > 1 else None
    model, optimizer = shardwise.prepare(task.model, optimizer, plan, device="cuda:0", collectives=collectives)
    return shardwise.step(model, optimizer, task.loss)


def _on_accelerate(task: Task, plan: Plan, *, num_ranks: int) -> Callable[[Any], object]:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
    model, prepared, backward = on_accelerate(task.model, optimizer, checkpointing=True)

    def step(batch: Any) -> None:
        backward(task.loss(model, batch))
        prepared.step()
        prepared.zero_grad()

    return step


def _drawn(tensor: Tensor) -> Tensor:
    """Random values, below the smallest vocabulary, for a batch that may be on the meta device."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, device="cuda", dtype=tensor.dtype)
    return torch.randint(5, 1000, tensor.shape, device="cuda")


def waiting() -> subprocess.Popen[str]:
    """A process that has imported all that it needs, and waits for cases."""
    command, pipe = [sys.executable, __file__, "cases", "-"], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def measure_all() -> None:
    """Measure the cases on standard input, one after the other."""
    for case in json.loads(sys.stdin.read()):
        try:
            found = measure(case)
        except Exception as error:
            found = {"failed": one_line(error)}
        hand_over({**case, **found})
        free()


def measured_by(process: subprocess.Popen[str], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows. What kernels and libraries leave on the device is these cases' own."""
    output, errors = process.communicate(json.dumps(cases))
    found = results_of(output)
    last = (errors.strip() or "no output").splitlines()[-1][-300:]
    return found + [{**case, "failed": last} for case in cases[len(found) :]]


def _timed(step: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        step()
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < _MOST_STEPS and sum(seconds) < _SECONDS):
        seconds.append(seconds_per_step(step, num_steps=1))
    return statistics.median(seconds)


def batches_of(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cases that share a process."""
    shared: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for case in cases:
        if case["kind"] not in ALONE:
            shared.setdefault((case["model"], case["num_ranks"]), []).append(case)
    return [*([case] for case in cases if case["kind"] in ALONE), *shared.values()]


def points(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return rows by model, ranks and budget."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _POINT), []).append(row)
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and budget: the auto plan's speed over the best of each kind, and its peak over the budget."""
    found = []
    for key, own in points(rows).items():
        for auto in (row for row in own if row["kind"] == "auto"):
            point = {**dict(zip(_POINT, key, strict=True)), "failed": auto.get("failed", "")}
            if not point["failed"]:
                best = {kind: _fastest(own, kinds=kinds) for kind, kinds in KINDS.items()}
                speeds = {kind: row["samples_per_s"] for kind, row in best.items() if row is not None}
                point["speed_ratios"] = {kind: auto["samples_per_s"] / speed for kind, speed in speeds.items()}
                point["num_fixed"] = sum("samples_per_s" in row and row["kind"] in KINDS["fixed"] for row in own)
                point["peak_of_budget"] = auto["device_bytes"] / auto["budget_bytes"]
            found.append(point)
    return found


def _fastest(rows: list[dict[str, Any]], *, kinds: Sequence[str]) -> dict[str, Any] | None:
    measured = [row for row in rows if row["kind"] in kinds and "samples_per_s" in row]
    return max(measured, key=lambda row: row["samples_per_s"], default=None)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown. Plans are: strategy, recompute, micro-batch; the fixed plan is the fastest as measured."""
    lines = [
        "| model | budget, GiB | auto | samples/s | predicted | best fixed plan | samples/s | auto / fixed "
        "| auto / Accelerate | device, GiB |",
        "|---|---:|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for point, own in zip(summary(rows), points(rows).values(), strict=True):
        (auto,) = (row for row in own if row["kind"] == "auto")
        fixed, ratios = _fastest(own, kinds=KINDS["fixed"]), point.get("speed_ratios", {})
        ranks = f", rank 0 of {auto['num_ranks']}" if auto["num_ranks"] > 1 else ""
        cells = [
            f"{auto['model']}{ranks}",
            f"{auto['budget_bytes'] / 2**30:.1f}",
            _plan_text(auto["plan"]),
            "ran out" if point["failed"] else f"{auto['samples_per_s']:.1f}",
            f"{auto['predicted_samples_per_s']:.1f}",
            *(("–", "–") if fixed is None else (_plan_text(fixed["plan"]), f"{fixed['samples_per_s']:.1f}")),
            *(f"{ratios[kind]:.2f}" if kind in ratios else "–" for kind in KINDS),
            "–" if point["failed"] else f"{auto['device_bytes'] / 2**30:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _plan_text(plan: dict[str, Any]) -> str:
    rows, ways = (
        " and ".join(dict.fromkeys([plan[usual], *plan[others].values()]))
        for usual, others in (("strategy", "overrides"), ("recompute", "recompute_overrides"))
    )
    return f"{rows}; {ways}; {plan['micro_batch']}" + ("" if plan["compile"] == "none" else "; compiled")


def _what(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "num_ranks", "share", "kind", "plan"))


def _tell(row: dict[str, Any]) -> None:
    what = " ".join(str(row["plan"][key]) for key in ("strategy", "recompute", "micro_batch", "compile"))
    print(
        f"{row['model']} {row['num_ranks']} {row['share']:.0%} {row['kind']} {what}: "
        f"{row.get('samples_per_s', 0):.2f} samples/s (predicted {row['predicted_samples_per_s']:.2f}), "
        f"{row.get('device_bytes', 0) / row['budget_bytes']:.3f} of budget {row.get('failed', '')}",
        flush=True,
    )


def run_all(wanted: list[dict[str, Any]], rows: list[dict[str, Any]], *, out: Path) -> None:
    """Measure cases; the rows of others stay."""
    ahead = waiting()
    for cases in batches_of(wanted):
        process, ahead = ahead, waiting()
        for row in measured_by(process, cases):
            rows = [one for one in rows if _what(one) != _what(row)] + [row]
            _tell(row)
        write(out, {**circumstances(), "summary": summary(rows), "rows": rows})
    ahead.kill()
    print(json.dumps(summary(rows), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("solve", "measure", "table", "cases"))
    parser.add_argument("file", type=Path, help="of plans, or of what was measured")
    parser.add_argument("--kinds", default="auto,accelerate,best,random")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file that are not measured again")
    parser.add_argument("--models", default=",".join(dict.fromkeys(name for name, _ in BATCHES)))
    parser.add_argument("--out", type=Path, default=RESULTS / "auto_budgets_h200.json")
    asked = parser.parse_args()
    if asked.action == "cases":
        import accelerate  # noqa: F401
        import transformers  # noqa: F401

        measure_all()
    elif asked.action == "table":
        print(*table(json.loads(asked.file.read_text())["rows"]), sep="\n")
    elif asked.action == "solve":
        asked_for = [(name, num_ranks) for name, num_ranks in BATCHES if name in asked.models.split(",")]
        write(asked.file, [case for name, num_ranks in asked_for for case in solve(name, num_ranks=num_ranks)])
    else:
        kinds = asked.kinds.split(",")
        wanted = [case for case in json.loads(asked.file.read_text()) if case["kind"] in kinds]
        wanted.sort(key=lambda case: kinds.index(case["kind"]))
        rows = json.loads(asked.out.read_text())["rows"] if asked.append else []
        run_all(wanted, rows, out=asked.out)


if __name__ == "__main__":
    main()
