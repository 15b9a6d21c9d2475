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

import os
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from subprocess import TimeoutExpired
from typing import Any

import measuring
import torch
import workers
from hugging_face_models import MODELS, TINY, make_model
from torch.nn.parallel import DistributedDataParallel

CONTESTANTS = ("shardwise", "fsdp2", "ddp", "shardwise-eager")
MODEL = "qwen3-0.6b"
WARM_UP, TURNS = 16, 5


def measure(contestant: str, *, steps: int, tiny: bool) -> dict[str, Any]:
    """Train once; return the seconds of a step, medians over turns, and the losses."""
    size, tokens, config = MODELS[MODEL].samples, MODELS[MODEL].tokens, MODELS[MODEL].values
    torch.manual_seed(0)
    model = make_model(MODEL, device="cpu" if tiny else "cuda", **(TINY if tiny else {}))
    ids = torch.randint(5, TINY["vocab_size"] if tiny else config["vocab_size"], (64, 16 if tiny else tokens))
    clock = make_clock(steps=steps)
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": steps}
    training = {"bf16": True, "per_device_train_batch_size": size, "learning_rate": 1e-4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            contestant,
            {"output_dir": tempfile.mkdtemp(), "use_cpu": tiny, "max_steps": WARM_UP + TURNS * steps}
            | quiet
            | training,
            model=model,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=[clock],
        )
        trainer.train()
    per_step = [(later - earlier) / steps for earlier, later in pairwise(clock.times)]
    return {
        "contestant": contestant,
        "samples_per_second": size / statistics.median(per_step),
        "step_seconds": statistics.median(per_step),
        "fastest_seconds": min(per_step),
        "slowest_seconds": max(per_step),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "peak_bytes": measuring.peaks()["allocated_bytes"],
        "told": [str(one.message) for one in caught if str(one.message).startswith("capture: ")],
    }


def make_clock(*, steps: int) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """When each turn began and ended."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if state.global_step >= WARM_UP and (state.global_step - WARM_UP) % steps == 0:
                measuring.settle()
                self.times.append(time.perf_counter())

    return Clock()


def make_trainer(contestant: str, args: dict[str, Any], **given: Any) -> Any:
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
    # On a CPU, which captures nothing, to ask for it is a mistake.
    capture = "off" if contestant.endswith("eager") or args["use_cpu"] else "on"
    plan = Plan(strategy="fsdp", precision="bf16", capture=capture)
    return ShardwiseTrainer(**given, args=TrainingArguments(**args), plan=plan)


def main() -> None:
    out = measuring.RESULTS / "trainer_hf_h200.json"
    asked = measuring.options(__doc__, one="", contestants=CONTESTANTS, steps=8, limit=70.0, tiny=False, out=out)
    if asked.one:
        return workers.tell(measure(asked.one, steps=asked.steps, tiny=asked.tiny))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    runs: list[dict[str, Any]] = []
    for contestant in asked.contestants:
        options = ["--one", contestant, "--steps", str(asked.steps), *(["--tiny"] if asked.tiny else [])]
        try:
            runs += workers.results_of(
                workers.output_of(*workers.torchrun(1), __file__, *options, limit_seconds=asked.limit)
            )
        except (workers.ProcessFailed, TimeoutExpired) as error:
            runs.append({"contestant": contestant, "failed": str(error)[-2500:]})
        print(runs[-1], flush=True)
        measuring.write(None if asked.tiny else asked.out, {**measuring.circumstances(), "runs": runs})
    sys.exit(1 if any("failed" in run for run in runs) else 0)


if __name__ == "__main__":
    main()
