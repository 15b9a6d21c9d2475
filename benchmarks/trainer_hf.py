"""Hugging Face's Trainer with our engine against its own, on one GPU: `python benchmarks/trainer_hf.py`.

Qwen3-0.6B (random weights), 2 x 1024 tokens, bf16, fused AdamW, clipping, the Trainer's defaults otherwise. One NCCL
rank and one process for each, one after the other:

    shardwise         ShardwiseTrainer(plan=Plan(strategy="fsdp", precision="bf16", capture="on"))
    shardwise-eager   the same with capture = "off"
    fsdp2             TrainingArguments(fsdp=True)
    ddp               DistributedDataParallel around the model: on one rank the Trainer would leave it out

Samples per second are medians over turns of several steps, timed from one on_step_end to another, with the device
waited for. Writes benchmarks/results/trainer_hf_h200.json. `--tiny` runs a small model on the CPU, to try this out.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from captured_models import MODELS

RESULTS = Path(__file__).parent / "results"
CONTESTANTS = ("shardwise", "fsdp2", "ddp", "shardwise-eager")
WARM_UP, TURNS = 16, 5


def measure(contestant: str, *, steps: int, tiny: bool) -> dict[str, Any]:
    """One training: the seconds of a step in each turn, and the losses."""
    import torch
    import transformers

    _, size, seq, config = MODELS["qwen3-0.6b"]
    if tiny:
        size, seq = 2, 16
        config = {**config, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).float()
    ids = torch.randint(5, config["vocab_size"], (64, seq))
    clock = make_clock(transformers.TrainerCallback, steps=steps, waits=not tiny)
    trainer = make_trainer(
        contestant,
        model=model,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[clock],
        args={
            "output_dir": tempfile.mkdtemp(),
            "use_cpu": tiny,
            "bf16": True,
            "per_device_train_batch_size": size,
            "max_steps": WARM_UP + TURNS * steps,
            "learning_rate": 1e-4,
            "logging_steps": steps,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        },
    )
    trainer.train()
    per_step = [(later - earlier) / steps for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "contestant": contestant,
        "samples_per_second": size / statistics.median(per_step),
        "step_seconds": statistics.median(per_step),
        "fastest_seconds": min(per_step),
        "slowest_seconds": max(per_step),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "peak_bytes": 0 if tiny else torch.cuda.max_memory_allocated(),
        "transformers": transformers.__version__,
        "accelerate": __import__("accelerate").__version__,
        "torch": torch.__version__,
        "device": "cpu" if tiny else torch.cuda.get_device_name(),
    }


def make_clock(callback: Any, *, steps: int, waits: bool) -> Any:
    import torch

    class Clock(callback):  # type: ignore[misc]
        """When each turn began and ended."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if state.global_step >= WARM_UP and (state.global_step - WARM_UP) % steps == 0:
                if waits:
                    torch.cuda.synchronize()
                self.times.append(time.perf_counter())

    return Clock()


def make_trainer(contestant: str, *, args: dict[str, Any], **given: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainingArguments

    from shardwise import Plan
    from shardwise.integrations import ShardwiseTrainer

    class DDPTrainer(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            if not training or isinstance(model, DistributedDataParallel):
                return model
            # Autocast, as it has under the Trainer's own DDP.
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            return DistributedDataParallel(model, device_ids=None if args["use_cpu"] else [0])

    if contestant == "fsdp2":
        return Trainer(**given, args=TrainingArguments(**args, fsdp=True))
    if contestant == "ddp":
        return DDPTrainer(**given, args=TrainingArguments(**args))
    # On a CPU, which captures nothing, to be asked for it is a mistake.
    capture = "off" if contestant.endswith("eager") or args["use_cpu"] else "on"
    plan = Plan(strategy="fsdp", precision="bf16", capture=capture)
    return ShardwiseTrainer(**given, args=TrainingArguments(**args), plan=plan)


def run(contestant: str, *, steps: int, tiny: bool, limit_seconds: float) -> dict[str, Any]:
    """One contestant, in a process of its own that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", __file__]
    command += ["--one", contestant, "--steps", str(steps), *(["--tiny"] if tiny else [])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"contestant": contestant, "failed": f"not done after {limit_seconds:g} s"}
    for line in ended.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            told = re.findall(r"UserWarning: (capture: .*)", ended.stderr)
            return {**found, "told": told}
    return {"contestant": contestant, "failed": ended.stderr[-2500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=CONTESTANTS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    parser.add_argument("--limit", type=float, default=70, help="seconds per contestant")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.one:
        print("RESULT " + json.dumps(measure(asked.one, steps=asked.steps, tiny=asked.tiny)), flush=True)
        return
    results = []
    out = asked.out or (None if asked.tiny else RESULTS / "trainer_hf_h200.json")
    for contestant in asked.contestants:
        began = time.monotonic()
        results.append(run(contestant, steps=asked.steps, tiny=asked.tiny, limit_seconds=asked.limit))
        print(json.dumps(results[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
        if out is not None:
            command = "python " + " ".join(["benchmarks/trainer_hf.py", *sys.argv[1:]])
            out.write_text(json.dumps({"command": command, "runs": results}, indent=1) + "\n")
    if any("failed" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
