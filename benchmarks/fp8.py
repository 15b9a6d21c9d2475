"""fp8 and bf16 on one GPU, in turn: `python benchmarks/fp8.py [--cases NAME …] [--ranks 8]`.

Rank 0 of 8 in rehearsal: every row of the program is issued, the other ranks are absent, and communication takes no
time, so that only the products can gain. `fsdp`, compiled units, fused AdamW, one batch on the device. Each case runs
in a process of its own, in which all ways are set up and blocks of steps alternate. Writes
benchmarks/results/fp8_h200.json after every case; rows of other cases are kept. `--predict` adds what the planner says
to all of its rows, without a GPU.

    bf16          ours
    tensorwise    ours in fp8, one scale per tensor
    rowwise       ours in fp8, one scale per row
    torchao       torchao's float8 (tensorwise, fp8 gathers) with fully_shard under torch's fake process group, the same
                  units, compiled; needs torchao (`pip install --no-deps torchao==0.18.0`)
    fully_shard   the same in bf16

In `graphs` cases units of ours are CUDA graphs. fp8_products.py times single layers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import measuring
import torch
import workers
from torch import Tensor, nn
from training_case import make_optimizer

import shardwise
from shardwise import Plan
from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.models.tasks import load_task
from shardwise.planner.search.candidates import cost
from shardwise.program.buffers import gather_bytes
from shardwise.program.spec import ROOT
from shardwise.program.units import unit_modules

# Until every way is compiled, and units are replayed.
WARM_UP, GRAPHS_WARM_UP = 8, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    batch: int
    seq: int
    recompute: str = "none"
    graphs: bool = False
    ways: tuple[str, ...] = ("bf16", "tensorwise", "rowwise")


_PEERS = ("bf16", "tensorwise", "torchao", "fully_shard")
CASES = {
    "Llama-8B 1×8192": Case(model="llama-3.1-8b", batch=1, seq=8192),
    "Llama-8B 2×4096": Case(model="llama-3.1-8b", batch=2, seq=4096),
    "Llama-1B 2×2048": Case(model="llama-3.2-1b", batch=2, seq=2048),
    "Llama-1B 4×2048": Case(model="llama-3.2-1b", batch=4, seq=2048),
    "Llama-1B 2×2048 graphs": Case(model="llama-3.2-1b", batch=2, seq=2048, graphs=True),
    "Llama-1B 4×2048 graphs": Case(model="llama-3.2-1b", batch=4, seq=2048, graphs=True),
    "Llama-8B 1×8192 peers": Case(model="llama-3.1-8b", batch=1, seq=8192, ways=_PEERS),
    "Llama-8B 1×8192 graphs": Case(
        model="llama-3.1-8b", batch=1, seq=8192, graphs=True, ways=("tensorwise", "torchao")
    ),
    "tiny": Case(model="llama-tiny", batch=2, seq=64),
    "tiny peers": Case(model="llama-tiny", batch=2, seq=64, ways=_PEERS),
}


def plan_of(case: Case, way: str) -> Plan:
    # The smallest model is there to try the benchmark itself, on a CPU.
    least = {"fp8_min_features": 16} if case.model == "llama-tiny" else {}
    fp8 = {"precision": "fp8", "fp8_recipe": way, **least} if way in ("tensorwise", "rowwise") else {}
    return Plan(
        **{
            "strategy": "fsdp",
            "precision": "bf16",
            "compile": "inductor",
            "recompute": case.recompute,
            "capture": "auto" if case.graphs else "off",
            **fp8,
        }
    )


def step_of(case: Case, way: str, *, device: str, collectives: Any) -> Callable[[], Tensor]:
    """Set up one way, and return its step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    task = load_task(case.model, seq=case.seq, device=device)
    model = task.model.train()
    batch = tuple(torch.randint(200, one.shape, device=device) for one in task.make_batch(case.batch))
    if way in ("torchao", "fully_shard"):
        shard_by_torch(model, in_fp8=way == "torchao", emulates=device == "cpu")
        optimizer = make_optimizer("adamw-fused", model)
    else:
        optimizer = make_optimizer("adamw-fused", model)
        shardwise.prepare(model, optimizer, plan_of(case, way), device=device, collectives=collectives)

    after_update = precomputed_scales if way == "torchao" else lambda model: None

    def step(*parts: Tensor) -> Tensor:
        loss = task.loss(model, parts)
        loss.backward()
        optimizer.step()
        after_update(model)
        optimizer.zero_grad()
        return loss.detach()

    return lambda: step(*batch)


def shard_by_torch(model: nn.Module, *, in_fp8: bool, emulates: bool) -> None:
    """Cut the same units by fully_shard, compiled as torchtitan compiles them; with torchao's float8 on request.

    As in torchtitan: layers are converted, then each block is compiled as one graph, then sharded, so that the hooks
    that gather stay outside of compiled code.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    modules = unit_modules(model)
    if in_fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulates)
        named = tuple(f"{name}." for name in modules if name != ROOT)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, path: path.startswith(named))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, module in modules.items():
        if name != ROOT:
            module.forward = torch.compile(module.forward, fullgraph=True)
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def precomputed_scales(model: nn.Module) -> None:
    """Compute the scales of all weights with one reduction, as torchao recommends under fully_shard."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def predicted(case: Case, way: str, *, ranks: int) -> dict[str, float]:
    """Return what the planner says, without the communication that it does not hide: here it takes no time."""
    plan = replace(plan_of(case, way), micro_batch=case.batch)
    spec = Model(case.model, seq=case.seq).spec_for(plan)
    cluster = cluster_of(f"{ranks}xh200")
    found = cost(spec, plan=plan, cluster=cluster, optimizer="adamw-fused", as_graphs=case.graphs)
    assert found.time is not None
    seconds = found.time.step_seconds - found.time.exposed_comm_seconds
    return {"step_seconds": seconds, "allocated_bytes": found.memory.allocated_bytes}


def gathered_share(case: Case) -> float:
    """Return the bytes of an fp8 gather of a block as a share of a bf16 gather's."""
    from shardwise.program.units import model_spec

    spec = model_spec(load_task(case.model, seq=case.seq, device="meta").model)
    unit = spec.units[-1]
    narrow, wide = (gather_bytes(unit, plan=plan_of(case, way), sharded=True) for way in ("tensorwise", "bf16"))
    return narrow / wide


def measure(case: Case, *, ranks: int, blocks: int, device: str, collectives: Any) -> dict[str, Any]:
    makes = {way: partial(step_of, case, way, device=device, collectives=collectives) for way in case.ways}
    ratios = [("bf16", way) for way in case.ways if "bf16" in case.ways and way != "bf16"]
    ratios += [(theirs, "tensorwise") for theirs in ("torchao", "fully_shard") if theirs in case.ways]
    warm_up = GRAPHS_WARM_UP if case.graphs else WARM_UP
    found = measuring.compared(makes, warm_up=warm_up, blocks=blocks, ratios=ratios)
    said = [f"{way}: the loss is {loss}" for way, loss in found["last_losses"].items() if not isfinite(loss)]
    return {**found, "predicted": {}, "gathered_share": gathered_share(case), "messages": said}


def predict(path: Path) -> None:
    """Write the planner's answers into all rows of a file. Needs no GPU."""
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        case = CASES[row["case"]]
        ours = [way for way in case.ways if way not in ("torchao", "fully_shard")]
        row["predicted"] = {way: predicted(case, way, ranks=row["ranks"]) for way in ours}
        for way, found in row["predicted"].items():
            seconds, peak = row["step_seconds"].get(way), row["peak_bytes"].get(way)
            if seconds and peak:
                time_off, memory_off = found["step_seconds"] / seconds - 1, found["allocated_bytes"] / peak - 1
                print(f"{row['case']}, {way}: time {time_off:+.1%}, allocated {memory_off:+.2%}", flush=True)
    measuring.write_part(path, "rows", rows)


def main() -> None:
    out = measuring.RESULTS / "fp8_h200.json"
    cases = [name for name in CASES if not name.startswith("tiny")]
    asked = measuring.options(
        __doc__, ranks=8, cases=cases, blocks=5, out=out, predict=False, device="cuda", limit=300, here=""
    )
    if asked.predict:
        predict(asked.out)
        return
    if asked.here:
        with measuring.job(asked.device, num_ranks=asked.ranks) as collectives:
            case = CASES[asked.here]
            found = measure(case, ranks=asked.ranks, blocks=asked.blocks, device=asked.device, collectives=collectives)
            workers.tell({"case": asked.here, **found})
        return
    options = ("--ranks", str(asked.ranks), "--blocks", str(asked.blocks), "--device", asked.device)
    for name, rows in workers.in_processes(__file__, asked.cases, *options, limit_seconds=asked.limit):
        measuring.show_compared(name, rows[0])
        print(f"gathered {rows[0]['gathered_share']:.3f} of bf16's bytes", flush=True)
        circumstances = {**measuring.circumstances(), "ranks": asked.ranks}
        # Rows of one file may come from several runs.
        rows = [{**row, **{key: circumstances[key] for key in ("ranks", "versions", "command")}} for row in rows]
        measuring.replace_rows(asked.out, rows, key=lambda row: row["case"])


if __name__ == "__main__":
    main()
