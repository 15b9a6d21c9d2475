"""A training step that keeps less until backward: ours against torch's own way of doing it, in one run.

    python benchmarks/recompute.py --case gpt-1.3b --memory --out benchmarks/results/recompute_cuda.json
    python benchmarks/recompute.py --case tiny --way full          one way, on a CPU

way               ours (the plan)                          torch's, around each block, under fully_shard
full              recompute = full                         checkpoint
selective         recompute = selective                    checkpoint that keeps matrix products and attention
offload           offload_activations                      save_on_cpu(pin_memory=True)
offload-inputs    recompute = full, offload_activations    checkpoint within save_on_cpu

Measured as in engine_step.py: blocks of steps in turn, of which the ratios count; memory of each engine by itself.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_step import GPT3, SMALL, Case, make_step, measure_memory, measure_time, report
from measuring import circumstances, write
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.plan import Plan

WAYS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload": {"offload_activations": True},
    "offload-inputs": {"recompute": "full", "offload_activations": True},
}
_CUDA = Case(strategy="fsdp", shape=GPT3, batch=4, seq=2048, num_ranks=1, device="cuda", precision="bf16", rounds=8)
CASES = {
    "gpt-1.3b": _CUDA,
    "tiny": Case(strategy="fsdp", shape=SMALL, batch=2, seq=64, steps_per_block=2, rounds=6),
}
# Its copies take seconds, and vary little.
_ROUNDS_OF_OFFLOAD = 4

_aten = torch.ops.aten
KEPT_BY_TORCH = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def arrange(model: nn.Module, plan: Plan, *, way: str) -> Plan:
    """Ours is in the plan; torch's goes around each block's forward."""
    if plan.engine != "torch":
        return replace(plan, **WAYS[way])
    for block in model.get_submodule("blocks").children():
        block.forward = partial(torchs_way, block.forward, way=way)
    return plan


def torchs_way(forward: Callable[..., Any], x: torch.Tensor, *, way: str) -> Any:
    if way == "full":
        return checkpoint(forward, x, use_reentrant=False)
    if way == "selective":
        contexts = partial(create_selective_checkpoint_contexts, KEPT_BY_TORCH)
        return checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
    with save_on_cpu(pin_memory=x.is_cuda):
        return checkpoint(forward, x, use_reentrant=False) if way == "offload-inputs" else forward(x)


def measure(case: Case, *, way: str, memory: bool) -> dict[str, Any]:
    if way == "offload":
        case = replace(case, rounds=_ROUNDS_OF_OFFLOAD, steps_per_block=2)
    make = partial(make_step, arrange=partial(arrange, way=way))
    found: dict[str, Any] = {"case": asdict(case), "time": measure_time(case, make=make)}
    if memory:
        found["memory"] = measure_memory(case, make=make)
    return found


def report_losses(way: str, losses: dict[str, list[float]]) -> None:
    apart = max(abs(ours - torchs) for ours, torchs in zip(*losses.values(), strict=True))
    print(f"{way:18} losses of the first {len(losses['torch'])} steps are at most {apart:.1e} apart", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--way", choices=WAYS, action="append", help="one of the ways; may be given several times")
    parser.add_argument("--batch", type=int, help="samples per rank, instead of the case's own")
    parser.add_argument("--memory", action="store_true", help="measure memory, too")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    case = CASES[options.case]
    case = replace(case, batch=options.batch or case.batch)
    results: dict[str, Any] = {**circumstances(), "cases": {}}
    for way in options.way or ("full", "selective", "offload"):
        found = results["cases"][f"{options.case} {way}"] = measure(case, way=way, memory=options.memory)
        report(way, found)
        report_losses(way, found["time"]["first_losses_of_rank_0"])
        write(options.out, results)


if __name__ == "__main__":
    main()
