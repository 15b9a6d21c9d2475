"""Memory and speed next to torch's `fully_shard`, rank 0 of N on one GPU: `python benchmarks/fsdp2_memory.py`.

Models of 1 to 15 billion parameters (large_models.toml), bf16, fused AdamW, one batch that lies on the device. Other
ranks are absent (rehearsed_peers.py). Each case runs in a process of its own, in which the ways take turns: each is set
up, trained until its memory is that of every later step, timed, and taken down again.

    ordinary       ours with capture = "off"
    graphs         ours as an ordinary loop is by default: units are CUDA graphs
    fully_shard    torch's own, cut into the same units

Writes benchmarks/results/fsdp2_memory_h200.json after every case. `--expandable`: with expandable segments, as ranks
that Shardwise starts have them; such rows are others. `--predict` adds to all rows what the planner says of them, and
prints the table; it needs no GPU.
"""

import gc
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import measuring
import torch
import workers
from hugging_face_models import LARGE, task_of
from training_case import make_optimizer, recompute_units

from shardwise.comm.job.absent import AbsentCollectives
from shardwise.engines import prepare
from shardwise.models.specs.traced import trace_task
from shardwise.plan import Plan
from shardwise.planner import estimate
from shardwise.program.units import unit_modules

WAYS: dict[str, dict[str, str]] = {
    "ordinary": {"capture": "off"},
    "fully_shard": {"engine": "torch", "capture": "off"},
    "graphs": {"capture": "auto"},
}
_FULL = {"strategy": "fsdp", "recompute": "full"}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, _FULL) for name in LARGE},
    **{
        f"{name}, shard_grad_op": (name, {**_FULL, "strategy": "shard_grad_op"})
        for name in ("qwen2.5-7b", "llama-3.1-8b")
    },
    **{f"{name}, no recompute": (name, {**_FULL, "recompute": "none"}) for name in ("llama-3.1-8b", "vit-g")},
}
# Units become graphs within the first steps.
WARM_UP, BLOCKS, BLOCK_STEPS = 6, 3, 3
# A way that leaves more behind would burden the next one.
_MOST_LEFT_BYTES = 64 * 2**20


def plan_of(case: str, way: str) -> Plan:
    return Plan(**{"precision": "bf16", **CASES[case][1], **WAYS[way]})


def measure(case: str, way: str) -> dict[str, Any]:
    """Train a model for some steps, and return what a step takes."""
    model, plan = CASES[case][0], plan_of(case, way)
    torch.manual_seed(0)
    is_torchs = plan.engine == "torch"
    task = task_of(model, device="cuda")
    units = unit_modules(task.model)
    prepared, optimizer = prepare(
        task.model,
        make_optimizer("adamw-fused", task.model),
        # Torch's engine recomputes by marks on the units.
        replace(plan, recompute="none") if is_torchs else plan,
        device="cuda",
        collectives=None if is_torchs else AbsentCollectives(),
    )
    if is_torchs and plan.recompute == "full":
        recompute_units(units)
    batch = task.make_batch(LARGE[model].samples)

    def step() -> torch.Tensor:
        loss = task.loss(prepared, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    gc.collect()
    torch.cuda.empty_cache()
    losses = [step().item() for _ in range(WARM_UP)]
    torch.cuda.reset_peak_memory_stats()
    seconds = [measuring.seconds_per_step(step, num_steps=BLOCK_STEPS) for _ in range(BLOCKS)]
    return {
        **measuring.peaks(),
        "device_bytes": measuring.used_bytes(),
        "block_seconds": seconds,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "losses": losses[:2],
    }


def in_turn(case: str, *, rounds: int) -> dict[str, Any]:
    """Return the row of a case: the most bytes of any round, and all blocks of steps."""
    by_way: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, found in by_way.items():
            found.append(measure(case, way))
            measuring.free()
            left = torch.cuda.memory_allocated()
            if left > _MOST_LEFT_BYTES:
                raise SystemExit(f"{case}: {way} has left {left / 2**20:.0f} MiB behind")
    totals = ("allocated_bytes", "reserved_bytes", "device_bytes", "retries")
    return {
        "case": case,
        "expandable": "expandable_segments" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        **{
            way: {
                **{name: max(one[name] for one in found) for name in totals},
                "block_seconds": [seconds for one in found for seconds in one["block_seconds"]],
                "losses": found[0]["losses"],
            }
            for way, found in by_way.items()
        },
    }


def shown(row: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each way: its bytes and its time, by those of fully_shard, and the errors of predictions."""
    peer = row["fully_shard"]
    for way in WAYS:
        own = row[way]
        parts = [f"{row['case']:30} {way:12} {'expandable' if row['expandable'] else '':10}"]
        for name in ("allocated", "reserved"):
            measured = own[f"{name}_bytes"]
            parts.append(f"{name} {measured / 2**30:6.2f} GiB ({measured / peer[f'{name}_bytes']:.3f}")
            parts[-1] += f", predicted {own['predicted'][name] / measured - 1:+.2%})" if "predicted" in own else ")"
        seconds, others = (statistics.median(one["block_seconds"]) for one in (own, peer))
        parts.append(f"step {1e3 * seconds:.1f} ms ({seconds / others:.3f})")
        yield "  ".join(parts)


def predict(rows: list[dict[str, Any]]) -> None:
    """Add the planner's answer to every row."""
    for model in dict.fromkeys(CASES[row["case"]][0] for row in rows):
        ways = [("bf16", how) for how in ("none", "full")]
        spec = trace_task(task_of(model, device="meta"), name=model, ways=ways)
        for row in rows:
            if CASES[row["case"]][0] == model:
                for way in WAYS:
                    found = estimate(
                        spec,
                        plan=plan_of(row["case"], way),
                        num_ranks=LARGE[model].ranks,
                        batch=LARGE[model].samples,
                        communicator_bytes=0,
                        as_graphs=way == "graphs",
                    )
                    row[way]["predicted"] = {
                        name: getattr(found, f"{name}_bytes") for name in ("allocated", "reserved", "device")
                    }


def main() -> None:
    out = measuring.RESULTS / "fsdp2_memory_h200.json"
    asked = measuring.options(__doc__, cases=list(CASES), rounds=2, expandable=False, predict=False, out=out, here="")
    if asked.predict:
        data = json.loads(asked.out.read_text())
        predict(data["rows"])
        measuring.write(asked.out, data)
        print("\n".join(line for row in data["rows"] for line in shown(row)))
        return
    if asked.here:
        with measuring.job("cuda", num_ranks=LARGE[CASES[asked.here][0]].ranks):
            workers.tell(in_turn(asked.here, rounds=asked.rounds))
        return
    if asked.expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for _, rows in workers.in_processes(__file__, asked.cases, "--rounds", str(asked.rounds), limit_seconds=200):
        print("\n".join(line for row in rows for line in shown(row)), flush=True)
        measuring.replace_rows(asked.out, rows, key=lambda row: (row["case"], row["expandable"]))


if __name__ == "__main__":
    main()
