"""Hugging Face models under our engine and others, in turn, on one GPU: `python benchmarks/hugging_face_peers.py`.

The models of captured_models.py: bf16, fused AdamW, one NCCL rank, one batch that lies on the device. Each model runs
in a process of its own, in which all engines are set up, and blocks of steps alternate between them. Writes
benchmarks/results/hugging_face_peers_h200.json, after every model.

    default          ours as `shardwise train` runs it: `fsdp`, and captured where that is safe; `default ddp` likewise
    fsdp, ddp        ours with capture = "off"
    … lean, compiled with `shardwise.lean_loss(model)`, and with units compiled by Inductor
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
from collections.abc import Callable, Mapping, Sequence
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
RATIOS = (
    *(("default", "accelerate"), ("default", "torch_ddp"), ("fsdp", "fully_shard"), ("ddp", "torch_ddp")),
    *(("default ddp", "accelerate"), ("default ddp", "torch_ddp"), ("fsdp", "accelerate")),
    *((f"default{words}", "accelerate") for words in (" lean", " ddp lean", " ddp lean compiled")),
)
# A block of steps lasts about so long.
BLOCK_SECONDS = 0.4


def step_of(engine: str, model: Any, batch: tuple[Any, Any], *, tell: Callable[[str], None]) -> Callable[[], Any]:
    """One step of a training of this model under an engine. `batch`: tokens and a mask."""
    import torch

    import shardwise
    from shardwise import Plan
    from shardwise.torch_engine.prepare import prepare_on_torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    backward: Callable[[Any], None] = torch.Tensor.backward
    captures = engine.startswith("default")
    if engine == "accelerate":
        model, optimizer, backward = on_accelerate(model, optimizer)
    elif engine in ("torch_ddp", "fully_shard"):
        strategy = "ddp" if engine == "torch_ddp" else "fsdp"
        model, optimizer = prepare_on_torch(
            model, optimizer, Plan(strategy=strategy, precision="bf16", engine="torch", capture="off")
        )
    else:
        words = engine.split()
        plan = Plan(
            strategy="ddp" if "ddp" in words else "fsdp",
            precision="bf16",
            compile="inductor" if "compiled" in words else "none",
            capture="auto" if captures else "off",
        )
        shardwise.prepare(model, optimizer, plan)
        if "lean" in words:
            shardwise.lean_loss(model)

    def step(ids: Any, mask: Any) -> Any:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    taken = shardwise.capture(step, model, optimizer, tell=tell) if captures else step
    return lambda: taken(*batch)


def on_accelerate(model: Any, optimizer: Any, *, checkpointing: bool = False) -> tuple[Any, Any, Callable[[Any], None]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        activation_checkpointing=checkpointing,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def measure(make: Callable[[], tuple[Any, Any, Any]], *, engines: Sequence[str], blocks: int) -> dict[str, Any]:
    """All engines, in turn. `make`: a model, tokens and a mask."""
    import torch

    told: list[str] = []
    steps, losses, peaks, failed = {}, {}, {}, {}
    for engine in engines:
        held = held_bytes()
        try:
            model, *batch = make()
            step = step_of(engine, model, tuple(batch), tell=told.append)
            # Replays 1 and 10 are compared with ordinary steps.
            losses[engine] = [step().item() for _ in range(15)]
        except Exception as error:
            failed[engine] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        steps[engine] = step
        peaks[engine] = torch.cuda.max_memory_allocated() - held
    seconds = in_turn(steps, blocks=blocks)
    return {
        "step_seconds": {engine: statistics.median(times) for engine, times in seconds.items()},
        "block_seconds": seconds,
        "peak_bytes": peaks,
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


def in_turn(steps: Mapping[str, Callable[[], Any]], *, blocks: int) -> dict[str, list[float]]:
    """Seconds per step of each block of steps; blocks alternate."""
    # Or each collection of garbage would walk through the models of all engines.
    gc.collect()
    gc.freeze()
    num_steps = {name: max(2, round(BLOCK_SECONDS / _timed(step, count=2))) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name, step in steps.items():
            seconds[name].append(_timed(step, count=num_steps[name]))
    return seconds


def _timed(step: Callable[[], Any], *, count: int) -> float:
    _settle()
    began = time.perf_counter()
    for _ in range(count):
        step()
    _settle()
    return (time.perf_counter() - began) / count


def _settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def held_bytes() -> int:
    """What is allocated on the GPU now; from here on the peak is counted again."""
    import torch

    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def join_alone(*, device: str) -> None:
    """A job of one rank. Accelerate takes the group that there is, if the variables of a launcher are there too."""
    import os

    import torch
    import torch.distributed as dist

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address}
    if device == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo", rank=0, world_size=1)


def _run_here(name: str, *, engines: Sequence[str], blocks: int) -> None:
    """A row on standard output."""
    import torch.distributed as dist

    join_alone(device="cuda")
    print(json.dumps({"model": name, **measure(lambda: build(name), engines=engines, blocks=blocks)}), flush=True)
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
