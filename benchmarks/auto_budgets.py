"""Auto plans against fixed ones within memory budgets, on one GPU.

    python benchmarks/auto_budgets.py solve    plans.json     chooses the plans; needs no GPU
    python benchmarks/auto_budgets.py measure  plans.json     runs them, each in a process of its own; writes
                                                              results/auto_budgets_h200.json
    … measure plans.json --kinds auto --append                some of them; the rows of the others stay

For each model the budget is 40, 60 and 80% of what it is predicted to need at a reference batch if nothing is
recomputed. Within it run: the auto plan; of the fixed plans (strategy × recompute, each at the largest micro-batch that
fits) the three that are predicted to be fastest; two others, drawn at random; and, of Hugging Face models, what
Accelerate's FSDP2 does by default with gradient checkpointing, at the largest micro-batch that is predicted to fit.
On one NCCL rank sharding frees next to nothing, so what there is to choose is recompute and micro-batch. Llama-8B is
rehearsed as rank 0 of 8 and of 64 without the others, and solved for links that cost nothing, since a rehearsal has
none. Weights are random; bf16, fused AdamW, no capture.

    samples_per_s    of steps that follow on each other, after warm-up
    device_bytes     the peak of what is reserved, and what else is in use on the device: context, communicators
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from captured_models import CONFIGS, MODELS, machine, used_bytes
from hugging_face_peers import join_alone, on_accelerate
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.comm.absent import AbsentCollectives, absent_group
from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.link import Fabric, Link
from shardwise.hardware.sourced import Sourced
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.planner.search.auto import RECOMPUTES, AutoRequest, solve_plan, with_budget
from shardwise.planner.search.candidates import Candidate, candidates, cost
from shardwise.spec import ModelSpec
from shardwise.tasks import Task, load_task
from shardwise.trace import trace_task

RESULTS = Path(__file__).parent / "results"
SHARES = (0.4, 0.6, 0.8)
# (model, ranks) → the batch at which the peak without recompute is taken. Rehearsals come before a job is joined.
BATCHES = {("llama-8b", 8): 4, ("llama-8b", 64): 4, ("llama-1b", 1): 8, ("vit-large", 1): 128, ("bert-large", 1): 64}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
BASE = Plan(precision="bf16", capture="off")
OPTIMIZER = "adamw-fused"
_SECONDS, _MOST_STEPS = 0.8, 12
KINDS = (("fixed", ("best", "random")), ("accelerate", ("accelerate",)))


def task_of(name: str, *, device: str) -> Task:
    if name not in (*MODELS, "llama-8b"):
        return load_task(name, device=device)
    import transformers

    kind, _, seq, config = MODELS["llama-1b" if name == "llama-8b" else name]
    if name == "llama-8b":
        config = {**config, **LLAMA_8B, "head_dim": 128, "tie_word_embeddings": False}
    made = getattr(transformers, CONFIGS[kind])(**config)
    with torch.device(device):
        model = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa").float().train()

    def make_batch(size: int) -> Tensor:
        return torch.randint(5, config["vocab_size"], (size, seq), device=device)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return Task(model=model, loss=loss, make_batch=make_batch)


def cluster_for(num_ranks: int) -> Cluster:
    """H200s; several are linked by links that cost nothing."""
    cluster = cluster_of(f"{min(num_ranks, 8)}xh200")
    if num_ranks == 1:
        return cluster
    rate, latency = (Sourced(value=value, kind="datasheet", source="a rehearsal has no wire") for value in (1e18, 0.0))
    free = Link(name="free", bytes_per_s=rate, ring_bytes_per_s=rate, latency_seconds=latency)
    if num_ranks <= 8:
        return replace(cluster, link=free)
    fabric = Fabric(link=replace(free, between_nodes=True))
    return replace(cluster, link=free, num_nodes=num_ranks // 8, fabric=fabric)


def solve(name: str, *, num_ranks: int) -> list[dict[str, Any]]:
    """The plans of one model at each budget."""
    cluster = cluster_for(num_ranks)
    ways = [("bf16", recompute) for recompute in RECOMPUTES]
    spec = trace_task(task_of(name, device="meta"), name=name, ways=ways)
    largest = replace(BASE, strategy="ddp" if num_ranks == 1 else "fsdp", micro_batch=BATCHES[name, num_ranks])
    whole = cost(spec, plan=largest, cluster=cluster, optimizer=OPTIMIZER).memory.device_bytes
    draw, cases = random.Random(0), []
    for share in SHARES:
        budget = round(share * whole)
        request = AutoRequest(plan=BASE, cluster=cluster, optimizer=OPTIMIZER, budget_bytes=budget)
        auto = solve_plan(lambda plan: spec, request=request).candidate
        within = with_budget(cluster, budget_bytes=budget)
        fixed = _fixed(spec, BASE, cluster=within)
        others = draw.sample(fixed[3:], min(2, len(fixed[3:])))
        rows = [("auto", auto), *(("best", one) for one in fixed[:3]), *(("random", one) for one in others)]
        if name in MODELS and num_ranks == 1:
            checkpointed = replace(BASE, engine="torch", recompute="full")
            theirs = _fixed(spec, checkpointed, cluster=within, strategies=("fsdp",), recomputes=("full",))
            rows += [("accelerate", one) for one in theirs]
        cases += [
            {
                "model": name,
                "num_ranks": num_ranks,
                "share": share,
                "budget_bytes": budget,
                "kind": kind,
                "predicted_samples_per_s": _speed(one),
                "predicted_device_bytes": one.memory.device_bytes,
                "plan": one.plan.to_dict(),
            }
            for kind, one in rows
        ]
        print(f"{name}, {num_ranks} ranks, {share:.0%} of {whole / 2**30:.1f} GiB: {auto.plan.to_dict()}", flush=True)
    return cases


def _fixed(
    spec: ModelSpec,
    plan: Plan,
    *,
    cluster: Cluster,
    strategies: Sequence[str] = tuple(STRATEGIES),
    recomputes: Sequence[str] = RECOMPUTES,
) -> list[Candidate]:
    """Plans of one strategy and one recompute that fit, the fastest first."""
    found = [
        one
        for recompute in recomputes
        for one in candidates(
            lambda plan: spec,
            plan=replace(plan, recompute=recompute),
            strategies=strategies,
            cluster=cluster,
            optimizer=OPTIMIZER,
            goal="throughput",
        )
        if one.fits == "yes"
    ]
    return sorted(found, key=lambda one: -_speed(one))


def _speed(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One plan, on this GPU, which this process has not used before."""
    import shardwise

    plan = Plan.from_dict(case["plan"])
    assert plan.micro_batch is not None
    num_ranks = case["num_ranks"]
    if num_ranks == 1:
        join_alone(device="cuda")
    with absent_group(num_ranks) if num_ranks > 1 else nullcontext():
        # Ours fills it straight into shards.
        task = task_of(case["model"], device="cuda" if case["kind"] == "accelerate" else "meta")
        optimizer: Any = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
        backward: Callable[[Any], None] = Tensor.backward
        if case["kind"] == "accelerate":
            model, optimizer, backward = on_accelerate(task.model, optimizer, checkpointing=True)
        else:
            collectives = AbsentCollectives() if num_ranks > 1 else None
            model, optimizer = shardwise.prepare(task.model, optimizer, plan, device="cuda:0", collectives=collectives)
        # What was there before it was prepared.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        batch = tree_map_only(Tensor, _drawn, task.make_batch(plan.micro_batch))

        def step() -> None:
            backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        seconds = _timed(step)
    return {
        "samples_per_s": plan.micro_batch * num_ranks / seconds,
        "device_bytes": torch.cuda.max_memory_reserved() + used_bytes() - torch.cuda.memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "machine": machine(),
    }


def _drawn(tensor: Tensor) -> Tensor:
    """Random values, below the smallest vocabulary, for a batch that may be on the meta device."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, device="cuda", dtype=tensor.dtype)
    return torch.randint(5, 1000, tensor.shape, device="cuda")


def waiting() -> subprocess.Popen[str]:
    """A process that has imported all that it needs, and waits for a case."""
    command, pipe = [sys.executable, __file__, "case", "-"], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def measured_alone(case: dict[str, Any], *, process: subprocess.Popen[str]) -> dict[str, Any]:
    """In a process of its own: what kernels and libraries leave on the device is then this plan's."""
    output, errors = process.communicate(json.dumps(case))
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not found:
        return {**case, "failed": (errors.strip() or "no output").splitlines()[-1][-300:]}
    return {**case, **json.loads(found[0].removeprefix("RESULT "))}


def _timed(step: Callable[[], None]) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 3 or (count < _MOST_STEPS and time.perf_counter() - began < _SECONDS):
        step()
        torch.cuda.synchronize()
        count += 1
    return (time.perf_counter() - began) / count


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and budget: the auto plan's speed over the best fixed one's, and its peak over the budget."""
    found = []
    for key in dict.fromkeys((row["model"], row["num_ranks"], row["share"]) for row in rows):
        own = [row for row in rows if (row["model"], row["num_ranks"], row["share"]) == key and "samples_per_s" in row]
        speeds = {kind: max((r["samples_per_s"] for r in own if r["kind"] in of), default=None) for kind, of in KINDS}
        autos = [row for row in own if row["kind"] == "auto"]
        if autos and speeds["fixed"]:
            (auto,) = autos
            ratios = {kind: auto["samples_per_s"] / speed for kind, speed in speeds.items() if speed is not None}
            peak = auto["device_bytes"] / auto["budget_bytes"]
            names = dict(zip(("model", "num_ranks", "share"), key, strict=True))
            found.append({**names, "speed_ratios": ratios, "peak_of_budget": peak})
    return found


def _what(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "num_ranks", "share", "kind", "plan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("solve", "measure", "case"))
    parser.add_argument("file", help="of plans")
    parser.add_argument("--kinds", default="auto,best,random,accelerate")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file that are not measured again")
    parser.add_argument("--models", default=",".join(dict.fromkeys(name for name, _ in BATCHES)))
    parser.add_argument("--out", type=Path, default=RESULTS / "auto_budgets_h200.json")
    asked = parser.parse_args()
    if asked.action == "case":
        import accelerate  # noqa: F401
        import transformers  # noqa: F401

        print("RESULT " + json.dumps(measure(json.loads(sys.stdin.read()))))
        return
    file = Path(asked.file)
    if asked.action == "solve":
        cases: list[dict[str, Any]] = []
        for name, num_ranks in BATCHES:
            cases += solve(name, num_ranks=num_ranks) if name in asked.models.split(",") else []
            file.write_text(json.dumps(cases, indent=1) + "\n")
        return
    kinds = asked.kinds.split(",")
    wanted = sorted(
        (case for case in json.loads(file.read_text()) if case["kind"] in kinds),
        key=lambda case: kinds.index(case["kind"]),
    )
    rows = json.loads(asked.out.read_text())["rows"] if asked.append else []
    used: dict[str, Any] = {}
    ahead = waiting()
    for case in wanted:
        process, ahead = ahead, waiting()
        row = measured_alone(case, process=process)
        used = row.pop("machine", used)
        rows = [one for one in rows if _what(one) != _what(case)] + [row]
        what = " ".join(str(row["plan"][key]) for key in ("strategy", "recompute", "micro_batch"))
        print(
            f"{row['model']} {row['num_ranks']} {row['share']:.0%} {row['kind']} {what}: "
            f"{row.get('samples_per_s', 0):.2f} samples/s (predicted {row['predicted_samples_per_s']:.2f}), "
            f"{row.get('device_bytes', 0) / row['budget_bytes']:.3f} of budget",
            flush=True,
        )
        data = {
            "machine": used,
            "summary": summary(rows),
            "rows": rows,
        }
        asked.out.write_text(json.dumps(data, indent=1) + "\n")
    ahead.kill()
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
