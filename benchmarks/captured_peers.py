"""Captured steps of our engine and of others, in turn, on one GPU: `python benchmarks/captured_peers.py`.

`fsdp`, bf16, fused AdamW, one NCCL rank, one batch that lies on the device: what an engine's step costs, and nothing of
the wire or of loading data. Our engine stays set up for a whole workload; each peer is set up next to it, and blocks of
steps alternate: ours, theirs, ours, theirs. Engines are those of `shardwise bench --engines`; what is not installed, or
fails, is listed with the reason. Writes benchmarks/results/captured_peers_h200.json, after every pair.

    python benchmarks/captured_peers.py --peers torch-captured,megatron-fsdp-captured
    python benchmarks/captured_peers.py --ours compiled --peers torch-compiled --workloads "GPT-124M 4×1024" --append
"""

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "captured_peers_h200.json"
# Name → the task's settings, micro-batch.
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-124M 4×1024": ({"model": "gpt2-124m", "seq": 1024}, 4),
    "ViT-L 32": ({"model": "vit-large"}, 32),
    "GPT-1.3B 2×2048": ({"model": "gpt-1.3b", "seq": 2048}, 2),
    "ViT-L 128": ({"model": "vit-large"}, 128),
    "GPT-1.3B 8×2048": ({"model": "gpt-1.3b", "seq": 2048}, 8),
}
# Ours replays from the fourth step on, or later where units are compiled, and compares its tenth replay. By hand a
# graph is made in the twelfth.
WARM_UP = 16


class Contender:
    """An engine at work on a workload."""

    def __init__(self, engine: str, task: dict[str, Any], micro_batch: int, *, place: Any) -> None:
        import torch

        from shardwise.bench.contestants import plan_for, why_not
        from shardwise.bench.run_files import BenchRun
        from shardwise.bench.subject import start
        from shardwise.plan import Plan
        from shardwise.tasks import load_task
        from shardwise.train.config import TrainConfig

        plan = Plan(strategy="fsdp", micro_batch=micro_batch, precision="bf16")
        config = TrainConfig.from_dict(
            {
                "task": {**task, "dataset": "random"},
                "plan": plan_for(engine, "fsdp", plan).to_dict(),
                "optimizer": {"name": "adamw", "lr": 3e-4, "fused": True},
                "train": {"steps": 100_000},
                "run": {"device": "cuda", "folder": "runs/captured_peers"},
            }
        )
        reason = why_not(engine, "fsdp", config)
        if reason:
            raise RuntimeError(reason)
        self.engine = engine
        self.block_seconds: list[float] = []
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        began = time.perf_counter()
        self._subject = start(BenchRun(config=config, engine=engine), place=place)
        torch.manual_seed(0)
        batch = load_task(task["model"], seq=task.get("seq"), device="meta").make_batch(micro_batch)
        self._subject.training.batches = itertools.repeat(_like(batch, self._subject))
        for _ in range(WARM_UP):
            taken = self._subject.step()
        self.loss = taken.loss.item()
        self.captured = bool(taken.captured) or type(self._subject.training.update).__name__ == "GraphUpdate"
        self.set_up_seconds = time.perf_counter() - began
        self.peak_bytes = torch.cuda.max_memory_allocated() - held

    def block(self, steps: int) -> None:
        self._subject.settle()
        began = time.perf_counter()
        for _ in range(steps):
            self._subject.step()
        self._subject.settle()
        self.block_seconds.append((time.perf_counter() - began) / steps)

    def row(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "captured": self.captured,
            "step_seconds": statistics.median(self.block_seconds),
            "block_seconds": list(self.block_seconds),
            "set_up_seconds": self.set_up_seconds,
            "peak_bytes": self.peak_bytes,
            "loss_after_warm_up": self.loss,
        }


def _like(batch: Any, subject: Any) -> Any:
    """A batch of that form with values, the same for every engine."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    num_answers = getattr(subject.training.task.model.shape, "vocab_size", 0) or 1000

    def filled(tensor: Any) -> Any:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, device="cuda")
        return torch.randint(num_answers, tensor.shape, generator=generator, device="cuda")

    return tuple(filled(tensor) for tensor in batch)


def pair(ours: Contender, peer: str, workload: str, *, place: Any, blocks: int, steps: int) -> dict[str, Any]:
    """Blocks of ours and of the peer, in turn."""
    row: dict[str, Any] = {"workload": workload, "peer": peer}
    try:
        task, micro_batch = WORKLOADS[workload]
        theirs = Contender(peer, task, micro_batch, place=place)
    except Exception as error:
        traceback.print_exc()
        return {**row, "why_not": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    ours.block_seconds = []
    for _ in range(blocks):
        ours.block(steps)
        theirs.block(steps)
    ratios = [b / a for a, b in zip(ours.block_seconds, theirs.block_seconds, strict=True)]
    return {**row, "ours": ours.row(), "theirs": theirs.row(), "ours_is_times_as_fast": statistics.median(ratios)}


def free() -> None:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    import torch

    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    return {**found, "cuda": torch.version.cuda}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", default="captured")
    parser.add_argument("--peers", default="torch-captured,megatron-fsdp-captured")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--block-seconds", type=float, default=0.4, help="about how long a block of steps is")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    import torch
    import torch.distributed as dist

    from shardwise.comm.join import joined

    # Or a class that was compiled for one workload would be compiled for any size at the next one, which is slower.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    rows = json.loads(options.out.read_text())["rows"] if options.append and options.out.exists() else []
    with joined(torch.device("cuda", 0)) as place:
        for workload in options.workloads.split(","):
            task, micro_batch = WORKLOADS[workload]
            ours = Contender(options.ours, task, micro_batch, place=place)
            ours.block(2)
            steps = max(2, round(options.block_seconds / ours.block_seconds[-1]))
            for peer in options.peers.split(","):
                row = pair(ours, peer, workload, place=place, blocks=options.blocks, steps=steps)
                free()
                rows.append({**row, "steps_in_block": steps})
                told = {"machine": machine(), "rows": rows}
                options.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
                print(_line(row), flush=True)
            del ours
            free()
    dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    if "why_not" in row:
        return f"{row['workload']:18} {row['peer']:24} did not run: {row['why_not']}"
    ours, theirs = row["ours"], row["theirs"]
    return (
        f"{row['workload']:18} {row['peer']:24} theirs {1000 * theirs['step_seconds']:7.2f} ms, "
        f"ours {1000 * ours['step_seconds']:7.2f} ms, {row['ours_is_times_as_fast']:.3f} times as fast; "
        f"peak {theirs['peak_bytes'] / 2**30:.1f} and {ours['peak_bytes'] / 2**30:.1f} GiB; "
        f"loss {theirs['loss_after_warm_up']:.4f} and {ours['loss_after_warm_up']:.4f}; "
        f"set up in {theirs['set_up_seconds']:.1f} s; captured {theirs['captured']} {ours['captured']}"
    )


if __name__ == "__main__":
    main()
