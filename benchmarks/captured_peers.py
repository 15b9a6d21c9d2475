"""CUDA graphs of our engine and of others, in turn, on one GPU: `python benchmarks/captured_peers.py`.

Ours are of units, in an ordinary loop; those of others are of whole steps, captured by hand. `fsdp`, bf16, fused
AdamW, one NCCL rank, one batch that lies on the device: what an engine's step costs, without
communication or the loading of data. Our engine stays set up for a whole workload; each peer is set up next to it, and
blocks of steps alternate: ours, theirs, ours, theirs. Engines are those of `shardwise bench --engines`; what is not
installed, or fails, is listed with the reason. Writes benchmarks/results/captured_peers_h200.json, after every pair.

    python benchmarks/captured_peers.py --peers torch-captured,megatron-fsdp-captured
    python benchmarks/captured_peers.py --ours compiled --peers torch-compiled --workloads "GPT-124M 4×1024" --append
"""

import itertools
import json
import statistics
import time
import traceback
from typing import Any

import measuring
import torch
import torch.distributed as dist

from shardwise.comm.job.join import joined
from shardwise.measure.bench.contestants import plan_for, why_not
from shardwise.measure.bench.run_files import BenchRun
from shardwise.measure.bench.subject import start
from shardwise.models.tasks import load_task
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig

# Name → the task's settings, micro-batch.
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-124M 4×1024": ({"model": "gpt2-124m", "seq": 1024}, 4),
    "ViT-L 32": ({"model": "vit-large"}, 32),
    "GPT-1.3B 2×2048": ({"model": "gpt-1.3b", "seq": 2048}, 2),
    "ViT-L 128": ({"model": "vit-large"}, 128),
    "GPT-1.3B 8×2048": ({"model": "gpt-1.3b", "seq": 2048}, 8),
}
# Ours replays after a few steps. By hand a graph is made in the twelfth.
WARM_UP = 16


class Contender:
    """An engine at work on a workload."""

    def __init__(self, engine: str, workload: str, *, place: Any) -> None:
        task, micro_batch = WORKLOADS[workload]
        plan = plan_for(engine, "fsdp", Plan(strategy="fsdp", micro_batch=micro_batch, precision="bf16"))
        config = TrainConfig.from_dict(
            {
                "task": {**task, "dataset": "random"},
                "plan": plan.to_dict(),
                "optimizer": {"name": "adamw", "lr": 3e-4, "fused": True},
                "train": {"steps": 100_000},
                "run": {"device": "cuda", "folder": "runs/captured_peers"},
            }
        )
        reason = why_not(engine, "fsdp", config)
        if reason:
            raise RuntimeError(reason)
        measuring.free()
        held, began = torch.cuda.memory_allocated(), time.perf_counter()
        self._subject = start(BenchRun(config=config, engine=engine), place=place)
        torch.manual_seed(0)
        batch = load_task(task["model"], seq=task.get("seq"), device="meta").make_batch(micro_batch)
        self._subject.training.batches = itertools.repeat(_like(batch, self._subject))
        for _ in range(WARM_UP):
            taken = self._subject.step()
        self.facts = {
            "engine": engine,
            "replayed_share": taken.replayed_share,
            "set_up_seconds": time.perf_counter() - began,
            "peak_bytes": measuring.peaks()["allocated_bytes"] - held,
            "loss_after_warm_up": taken.loss.item(),
        }

    def step(self) -> None:
        self._subject.step()

    def row(self, seconds: list[float]) -> dict[str, Any]:
        return {**self.facts, "step_seconds": statistics.median(seconds), "block_seconds": seconds}


def _like(batch: Any, subject: Any) -> Any:
    """Return a batch of that form with values, the same for every engine."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    num_answers = getattr(subject.training.task.model.shape, "vocab_size", 0) or 1000

    def filled(tensor: Any) -> Any:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, device="cuda")
        return torch.randint(num_answers, tensor.shape, generator=generator, device="cuda")

    return tuple(filled(tensor) for tensor in batch)


def pair(ours: Contender, peer: str, workload: str, *, place: Any, blocks: int, block_seconds: float) -> dict[str, Any]:
    """Measure blocks of ours and of the peer, in turn."""
    row: dict[str, Any] = {"workload": workload, "peer": peer}
    try:
        theirs = Contender(peer, workload, place=place)
    except Exception as error:
        traceback.print_exc()
        return {**row, "why_not": measuring.one_line(error)}
    steps = {"ours": ours.step, "theirs": theirs.step}
    seconds = measuring.in_turn(steps, blocks=blocks, block_seconds=block_seconds)
    rows = {"ours": ours.row(seconds["ours"]), "theirs": theirs.row(seconds["theirs"])}
    return {**row, **rows, "ours_is_times_as_fast": measuring.median_ratio(seconds["theirs"], seconds["ours"])}


def main() -> None:
    asked = measuring.options(
        __doc__,
        ours="captured",
        peers="torch-captured,megatron-fsdp-captured",
        workloads=",".join(WORKLOADS),
        blocks=5,
        block_seconds=0.4,
        append=False,
        out=measuring.RESULTS / "captured_peers_h200.json",
    )
    # Or a class that was compiled for one workload would be compiled for any size at the next one, which is slower.
    torch._dynamo.config.automatic_dynamic_shapes = False
    measuring.join_alone("cuda")
    rows = json.loads(asked.out.read_text())["rows"] if asked.append and asked.out.exists() else []
    with joined(torch.device("cuda", 0)) as place:
        for workload in asked.workloads.split(","):
            ours = Contender(asked.ours, workload, place=place)
            for peer in asked.peers.split(","):
                turns = {"blocks": asked.blocks, "block_seconds": asked.block_seconds}
                rows.append(pair(ours, peer, workload, place=place, **turns))
                measuring.free()
                measuring.write(asked.out, {**measuring.circumstances(), "rows": rows})
                for name in ("ours", "theirs"):
                    measuring.show(f"{workload}, {peer}, {name}", rows[-1].get(name, {}))
                measuring.show(workload, rows[-1])
            del ours
            measuring.free()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
