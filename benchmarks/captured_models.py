"""Hugging Face models, eager and captured, on one GPU: `python benchmarks/captured_models.py`.

For each: the median time of a step, the time in which the GPU was busy with kernels in one step, memory, and what
`capture = "auto"` decided. Weights are random; bf16, fused AdamW, `fsdp` on one NCCL rank. Each model runs in a process
of its own, first eager, then captured. Writes benchmarks/results/captured_models_h200.json; with `--compile inductor`
units are compiled in both, and benchmarks/results/captured_models_inductor_h200.json is written.

    allocated_bytes, reserved_bytes   peaks of the training: warm-up, comparisons and replays
    mixed_…                           peaks of all that, and then of steps with a padded batch (a guard fails), of half
                                      the tokens (other graphs), and evaluations under no_grad, all in between
    other_device_bytes                in use on the device at the end besides what is reserved: context, graphs
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LLAMA_LIKE = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_cache": False}
# Name → kind of model, samples, tokens, config.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3ForCausalLM", 2, 1024,
        {**_LLAMA_LIKE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "max_position_embeddings": 40960},
    ),
    "gemma3-1b": (
        "Gemma3ForCausalLM", 2, 1024,
        {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
         "query_pre_attn_scalar": 256, "max_position_embeddings": 131072, "use_cache": False},
    ),
    "bert-large": (
        "BertForMaskedLM", 16, 256,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 30522},
    ),
    "llama-1b": (
        "LlamaForCausalLM", 2, 2048,
        {**_LLAMA_LIKE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
         "max_position_embeddings": 131072},
    ),
}  # fmt: skip
CONFIGS = {
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "BertForMaskedLM": "BertConfig",
    "LlamaForCausalLM": "LlamaConfig",
}


def build(name: str) -> tuple[Any, Any, Any]:
    """(model, tokens, a mask of ones), with random weights on the GPU."""
    import torch
    import transformers

    kind, size, seq, config = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, CONFIGS[kind])(**config)
    with torch.device("cuda"):
        model = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa").float().train()
    ids = torch.randint(5, config["vocab_size"], (size, seq), device="cuda")
    return model, ids, torch.ones_like(ids)


def training(name: str, *, capture: str, backend: str, tell: Callable[[str], None]) -> tuple[Any, Any, tuple[Any, Any]]:
    """(model, step, batch) of one model."""
    import torch

    import shardwise
    from shardwise import Plan

    model, ids, mask = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shardwise.prepare(model, optimizer, Plan(precision="bf16", compile=backend, capture=capture))

    def step(ids: Any, mask: Any) -> Any:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, shardwise.capture(step, model, optimizer, tell=tell), (ids, mask)


def measure(name: str, *, capture: str, backend: str, steps: int) -> dict[str, Any]:
    """One training of one model: what a step takes, once it is warm."""
    import torch

    from shardwise.engine.captured.compile_clock import CompileClock

    lines: list[str] = []
    model, taken, (ids, mask) = training(name, capture=capture, backend=backend, tell=lines.append)
    # Replays 1 and 10 are compared with ordinary steps; the first may compile.
    with CompileClock() as clock:
        for _ in range(15):
            loss = taken(ids, mask)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(steps):
            loss = taken(ids, mask)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / steps)
    steady = _peaks("")
    busy = _busy_seconds(lambda: taken(ids, mask))
    mix(model, taken, ids, mask)
    return {
        "model": name,
        "capture": capture,
        "compile": backend,
        "compile_seconds": clock.seconds,
        "step_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "gpu_busy_seconds": busy,
        **steady,
        **_peaks("mixed_"),
        "other_device_bytes": used_bytes() - torch.cuda.memory_reserved(),
        "loss": loss.item(),
        "told": lines,
    }


def _peaks(prefix: str) -> dict[str, int]:
    import torch

    return {
        f"{prefix}allocated_bytes": torch.cuda.max_memory_allocated(),
        f"{prefix}reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def used_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def mix(model: Any, taken: Any, ids: Any, mask: Any) -> None:
    """Three rounds of what comes in between in a training. Of an evaluation the losses are kept."""
    import torch

    padded = mask.clone()
    padded[0, -9:] = 0
    half = ids.shape[1] // 2
    short_ids, short_mask = ids[:, :half].contiguous(), mask[:, :half].contiguous()
    losses = []
    for _ in range(3):
        taken(ids, padded)
        model.eval()
        with torch.no_grad():
            losses += [model(input_ids=ids, attention_mask=mask, labels=ids).loss for _ in range(2)]
        model.train()
        for _ in range(4):
            taken(short_ids, short_mask)
        for _ in range(2):
            taken(ids, mask)
    assert torch.stack(losses).isfinite().all()


def _busy_seconds(step: Callable[[], Any]) -> float:
    """The time in which at least one kernel or copy ran, in one step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type.name == "CUDA"
    )
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy * 1e-6


def _run_here(name: str, *, backend: str, steps: int) -> None:
    """Eager, then captured; a row each on standard output."""
    import gc

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    for capture in ("off", "auto"):
        print(json.dumps(measure(name, capture=capture, backend=backend, steps=steps)), flush=True)
        gc.collect()
        # Tensors of torch itself, which the next training would find.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", choices=("none", "inductor", "aot_eager"), default="none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", default="")
    arguments = parser.parse_args()
    if arguments.here:
        _run_here(arguments.here, backend=arguments.compile, steps=arguments.steps)
        return
    of_backend = "" if arguments.compile == "none" else f"_{arguments.compile}"
    out = arguments.out or RESULTS / f"captured_models{of_backend}_h200.json"
    rows = []
    for name in arguments.models:
        command = [sys.executable, __file__, "--here", name, "--steps", str(arguments.steps)]
        command += ["--compile", arguments.compile]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        if len(found) != 2:
            print(name, "failed:", ended.stderr[-1500:], flush=True)
            continue
        rows += found
        eager, captured = found
        print(
            f"{name}: eager {eager['step_seconds'] * 1e3:.1f} ms (GPU busy {eager['gpu_busy_seconds'] * 1e3:.1f}), "
            f"captured {captured['step_seconds'] * 1e3:.1f} (busy {captured['gpu_busy_seconds'] * 1e3:.1f}); "
            f"captured / busy eager {captured['step_seconds'] / eager['gpu_busy_seconds']:.3f}; reserved "
            f"{eager['reserved_bytes'] / 2**30:.2f} and {captured['reserved_bytes'] / 2**30:.2f} GiB, mixed "
            f"{eager['mixed_reserved_bytes'] / 2**30:.2f} and {captured['mixed_reserved_bytes'] / 2**30:.2f}; "
            f"compiled {eager['compile_seconds']:.1f} and {captured['compile_seconds']:.1f} s",
            captured["told"],
            flush=True,
        )
        # After each: what was measured is kept when time runs out.
        out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def machine() -> dict[str, str]:
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
