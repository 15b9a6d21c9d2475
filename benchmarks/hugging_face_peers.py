"""Hugging Face models under our engine and others, in turn, on one GPU: `python benchmarks/hugging_face_peers.py`.

The models of captured_models.py: bf16, fused AdamW, one NCCL rank, one batch that lies on the device. Each model runs
in a process of its own, in which all engines are set up, and blocks of steps alternate between them. Writes
benchmarks/results/hugging_face_peers_h200.json, after every model.

    default          ours as `shardwise train` runs it: `fsdp`, and captured where that is safe
    fsdp, ddp        ours with capture = "off"
    fully_shard      torch's own, cut into the same units
    torch_ddp        torch's DistributedDataParallel under autocast
    accelerate       Accelerate's FSDP2 (transformer_based_wrap), without gradient checkpointing
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from captured_models import MODELS, build, machine

RESULTS = Path(__file__).parent / "results" / "hugging_face_peers_h200.json"
# What the host bounds is compared step by step; the larger models as they are by default.
_BY_DEFAULT = ("default", "torch_ddp", "accelerate")
ENGINES = {
    "qwen3-0.6b": (*_BY_DEFAULT, "fsdp", "fully_shard", "ddp"),
    "gemma3-1b": _BY_DEFAULT,
    "bert-large": (*_BY_DEFAULT, "fsdp", "fully_shard", "ddp"),
    "llama-1b": _BY_DEFAULT,
}
# Of step times.
RATIOS = (("default", "accelerate"), ("default", "torch_ddp"), ("fsdp", "fully_shard"), ("ddp", "torch_ddp"))
# A block of steps lasts about so long.
BLOCK_SECONDS = 0.4


def step_of(engine: str, name: str, *, tell: Callable[[str], None]) -> Callable[[], Any]:
    """One step of a training under an engine."""
    import torch

    import shardwise
    from shardwise import Plan
    from shardwise.torch_engine.prepare import prepare_on_torch

    model, ids, mask = build(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    backward: Callable[[Any], None] = torch.Tensor.backward
    if engine in ("default", "fsdp", "ddp"):
        strategy = "fsdp" if engine == "default" else engine
        capture = "auto" if engine == "default" else "off"
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, precision="bf16", capture=capture))
    elif engine == "accelerate":
        model, optimizer, backward = on_accelerate(model, optimizer)
    else:
        strategy = "ddp" if engine == "torch_ddp" else "fsdp"
        model, optimizer = prepare_on_torch(
            model, optimizer, Plan(strategy=strategy, precision="bf16", engine="torch", capture="off")
        )

    def step(ids: Any, mask: Any) -> Any:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    taken = shardwise.capture(step, model, optimizer, tell=tell) if engine == "default" else step
    return lambda: taken(ids, mask)


def on_accelerate(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def measure(name: str, *, engines: Sequence[str], blocks: int) -> dict[str, Any]:
    """All engines of a model, in turn."""
    import torch

    told: list[str] = []
    steps, losses, num_steps, failed = {}, {}, {}, {}
    for engine in engines:
        try:
            step = step_of(engine, name, tell=told.append)
        except Exception as error:
            failed[engine] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        steps[engine] = step
        # Replays 1 and 10 are compared with ordinary steps.
        losses[engine] = [step().item() for _ in range(15)]
        began = time.perf_counter()
        losses[engine].append(step().item())
        num_steps[engine] = max(2, round(BLOCK_SECONDS / (time.perf_counter() - began)))
    # Or each collection of garbage would walk through the models of all engines.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(blocks):
        for engine, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(num_steps[engine]):
                step()
            torch.cuda.synchronize()
            seconds[engine].append((time.perf_counter() - began) / num_steps[engine])
    return {
        "model": name,
        "step_seconds": {engine: statistics.median(times) for engine, times in seconds.items()},
        "block_seconds": seconds,
        "ratios": {
            f"{ours} / {theirs}": statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))
            for ours, theirs in RATIOS
            if ours in seconds and theirs in seconds
        },
        "first_losses": {engine: found[:3] for engine, found in losses.items()},
        "last_losses": {engine: found[-1] for engine, found in losses.items()},
        "told": told,
        "failed": failed,
    }


def _run_here(name: str, *, engines: Sequence[str], blocks: int) -> None:
    """A row on standard output."""
    import os

    import torch
    import torch.distributed as dist

    # Accelerate takes the group that there is, if the variables of a launcher are there too.
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
    }
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    print(json.dumps(measure(name, engines=engines, blocks=blocks)), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--engines", nargs="*", default=[])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", default="")
    arguments = parser.parse_args()
    if arguments.here:
        engines = arguments.engines or ENGINES[arguments.here]
        _run_here(arguments.here, engines=engines, blocks=arguments.blocks)
        return
    rows = []
    for name in arguments.models:
        command = [sys.executable, __file__, "--here", name, "--blocks", str(arguments.blocks)]
        command += ["--engines", *arguments.engines]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        if not found:
            print(name, "failed:", ended.stderr[-1500:], flush=True)
            continue
        rows += found
        (row,) = found
        times = ", ".join(f"{engine} {1e3 * taken:.1f}" for engine, taken in row["step_seconds"].items())
        ratios = ", ".join(f"{names} {ratio:.3f}" for names, ratio in row["ratios"].items())
        print(f"{name}: {times} ms; {ratios}", row["told"], row["failed"] or "", flush=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
