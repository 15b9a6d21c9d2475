"""Trainers of transformers and TRL with our engine against their own, on one GPU: `python benchmarks/trainer_hf.py`.

Random weights, bf16, fused AdamW, clipping, the trainers' defaults otherwise. One NCCL rank and one process for each,
one after the other:

    shardwise         Plan(strategy="fsdp", precision="bf16"): units are CUDA graphs by default
    shardwise-eager   the same with capture = "off"
    fsdp2             TrainingArguments(fsdp=True)
    ddp               DistributedDataParallel around the model: on one rank a trainer would leave it out

    one pass       transformers' Trainer and Qwen3-0.6B, 2 × 1024 tokens, one pass per step
    accumulation   the same with four passes per step
    sft            TRL's SFTTrainer, four passes of 2 samples per step. Lengths from 64 to 1024, most of them short,
                   padded to a multiple of 64
    dpo lora       TRL's DPOTrainer with LoRA of rank 16 on all linear layers, lengths and padding as in sft

    lengths        transformers' Trainer and a model of SmolLM3's shape, four passes of 4 samples per step. Any lengths
                   from 64 to 1024, padded to a multiple of 64
    lengths, moe   the same with one of Qwen3-MoE's shape

The same samples come in every turn, in the same order: 32, or 400 of any lengths. Samples per second are medians over
turns, timed from one on_step_end to another, with the device waited for; first_seconds is the time of all turns before
the measured ones, from the first step's beginning on. Where `datasets` is not installed, lists stand in for it
(listed_datasets.py). Writes benchmarks/results/trainer_hf_h200.json; rows of others are kept. `--tiny` runs a small
model on the CPU, to try this out. `--predict` prints what the planner says of our memory in the cases of any lengths,
without a GPU.
"""

import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from subprocess import TimeoutExpired
from typing import Any

import listed_datasets
import measuring
import torch
import workers
from hugging_face_models import MODELS, TINY, VARIED, make_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

CONTESTANTS = ("shardwise", "fsdp2", "ddp", "shardwise-eager")
SAMPLES, TURNS = 32, 4
# Turns before the measured ones: every shape comes at least once per turn, and the ninth time it is replayed.
WARM_UP = {"shardwise": 9}
_PADDED_TO = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer and its settings; `rows(num_words, num_tokens)` makes the samples of a turn.

    warm_up, turns   turns before the measured ones, and these; without the former those of WARM_UP
    """

    rows: Callable[[int, int], list[dict[str, Any]]]
    model: str = "qwen3-0.6b"
    trainer: str = "Trainer"
    passes: int = 1
    warm_up: int = 0
    turns: int = TURNS
    adapters: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def classes(self) -> tuple[type, type]:
        """Return the class of the trainer and that of its arguments."""
        if self.trainer == "Trainer":
            from transformers import Trainer, TrainingArguments

            return Trainer, TrainingArguments
        listed_datasets.install()
        import trl

        return getattr(trl, self.trainer), getattr(trl, self.trainer.replace("Trainer", "Config"))


def fixed_rows(num_words: int, num_tokens: int) -> list[dict[str, Any]]:
    ids = torch.randint(5, num_words, (SAMPLES, num_tokens), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def skewed_lengths(longest: int) -> list[int]:
    """Return lengths from 64 on (or an eighth of a tiny longest), of which half are below a quarter of the longest."""
    least, draw = min(_PADDED_TO, longest // 8), random.Random(0)
    return [min(longest, int(least + draw.lognormvariate(0, 0.9) * longest / 6)) for _ in range(SAMPLES)]


def any_rows(num_words: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return the samples of 25 steps, with lengths from 64 (or an eighth of a tiny longest) to the longest."""
    draw = random.Random(2)
    lengths = [draw.randint(min(_PADDED_TO, num_tokens // 8), num_tokens) for _ in range(400)]
    rows = [[draw.randrange(5, num_words) for _ in range(length)] for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of samples, padded to a multiple of _PADDED_TO."""
    width = -(-max(len(row["input_ids"]) for row in rows) // _PADDED_TO) * _PADDED_TO

    def column(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([list(row[name]) + [filler] * (width - len(row[name])) for row in rows])

    labels = column("labels", -100)
    return {"input_ids": column("input_ids", 0), "attention_mask": (labels != -100).long(), "labels": labels}


def sft_rows(num_words: int, num_tokens: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    rows = [[draw.randrange(5, num_words) for _ in range(length)] for length in skewed_lengths(num_tokens)]
    return [{"input_ids": row, "labels": row} for row in rows]


def dpo_rows(num_words: int, num_tokens: int) -> list[dict[str, Any]]:
    draw = random.Random(1)

    def text(num: int) -> str:
        return " ".join(f"w{draw.randrange(5, num_words)}" for _ in range(max(1, num)))

    return [
        {"prompt": text(length // 4), "chosen": " " + text(length // 2), "rejected": " " + text(3 * length // 4 - 2)}
        for length in skewed_lengths(num_tokens)
    ]


_PADDING = {"pad_to_multiple_of": _PADDED_TO, "max_length": None, "gradient_checkpointing": False}
CASES = {
    "one pass": Case(rows=fixed_rows),
    "accumulation": Case(rows=fixed_rows, passes=4),
    "sft": Case(rows=sft_rows, trainer="SFTTrainer", passes=4, options=_PADDING),
    "lengths": Case(rows=any_rows, model="smollm3-0.4b", passes=4, warm_up=2, turns=2),
    "lengths, moe": Case(rows=any_rows, model="qwen3-moe-0.7b", passes=4, warm_up=2, turns=2),
    "dpo lora": Case(rows=dpo_rows, trainer="DPOTrainer", passes=4, adapters=True, options=_PADDING),
}


def measure(name: str, contestant: str, *, tiny: bool) -> dict[str, Any]:
    """Train once; return the seconds of a step, medians over turns, and the losses."""
    case = CASES[name]
    known = (MODELS | VARIED)[case.model]
    size = known.samples
    torch.manual_seed(0)
    model = make_model(case.model, device="cpu" if tiny else "cuda", **(TINY if tiny else {}))
    num_words = model.config.vocab_size
    rows = case.rows(num_words, 16 if tiny else known.tokens)
    steps, warm_up = len(rows) // (size * case.passes), case.warm_up or WARM_UP.get(contestant, 1)
    clock = make_clock(steps=steps, warm_up=warm_up * steps)
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": steps}
    training = {"bf16": True, "per_device_train_batch_size": size, "gradient_accumulation_steps": case.passes}
    lasts = {
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_steps": (warm_up + case.turns) * steps,
        "use_cpu": tiny,
    }
    args = {"output_dir": tempfile.mkdtemp(), **quiet, **training, **lasts, **case.options}
    given: dict[str, Any] = {"model": model, "train_dataset": rows, "callbacks": [clock]}
    if case.rows is any_rows:
        given["data_collator"] = padded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case.trainer != "Trainer":
            case.classes()
            from datasets import Dataset

            given |= {"train_dataset": Dataset.from_list(rows), "processing_class": make_tokenizer(num_words)}
        if case.adapters:
            from peft import LoraConfig

            given["peft_config"] = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = make_trainer(case, contestant, args, **given)
        trainer.train()
    per_step = [(later - earlier) / steps for earlier, later in pairwise(clock.times)]
    return {
        "case": name,
        "contestant": contestant,
        "samples_per_second": size * case.passes / statistics.median(per_step),
        "step_seconds": statistics.median(per_step),
        "fastest_seconds": min(per_step),
        "slowest_seconds": max(per_step),
        "first_seconds": clock.times[0] - clock.began,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **measuring.peaks(),
        "told": [str(one.message) for one in caught if str(one.message).startswith("capture: ")],
    }


def predict(name: str) -> None:
    """Print the memory that the planner predicts for our Trainer, with units as CUDA graphs and without."""
    from shardwise import Plan
    from shardwise.models.specs.traced import trace_task
    from shardwise.models.tasks import Task
    from shardwise.planner.memory.peak import estimate

    case, known = CASES[name], (MODELS | VARIED)[CASES[name].model]

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 100, (size, known.tokens), device="meta")
        # What the model makes of a mask with padding.
        mask = torch.ones(size, 1, known.tokens, known.tokens, dtype=torch.bool, device="meta")
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    model = make_model(case.model, device="meta")
    task = Task(model=model, loss=lambda model, batch: model(**batch).loss, make_batch=make_batch)
    rows, size = case.rows(100, known.tokens), known.samples
    passes = [padded(rows[at : at + size]) for at in range(0, len(rows), size)]
    spec = trace_task(task, name=name, ways=[("bf16", "none")])
    spec = replace(spec, lengths=tuple(batch["input_ids"].shape[1] for batch in passes))
    plan = Plan(strategy="fsdp", precision="bf16", accumulate=case.passes)
    for as_graphs in (True, False):
        memory = estimate(spec, plan=plan, num_ranks=1, batch=size, made_on_device=True, as_graphs=as_graphs)
        measuring.show(f"{name}, {'units' if as_graphs else 'off'}", {"reserved_bytes": memory.reserved_bytes})


def make_tokenizer(num_words: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, num_words)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def make_clock(*, steps: int, warm_up: int) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """When the first step began, and when each turn began and ended."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if state.global_step >= warm_up and (state.global_step - warm_up) % steps == 0:
                measuring.settle()
                self.times.append(time.perf_counter())

    return Clock()


def make_trainer(case: Case, contestant: str, args: dict[str, Any], **given: Any) -> Any:
    from shardwise import Plan
    from shardwise.integrations import ShardwiseMixin

    stock: Any
    stock, arguments = case.classes()

    class InOrder(stock):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    class UnderDDP(InOrder):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            if not training or isinstance(model, DistributedDataParallel):
                return model
            # Autocast, as it has under the trainer's own DDP.
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            return DistributedDataParallel(model, device_ids=None if args["use_cpu"] else [0])

    class UnderShardwise(ShardwiseMixin, InOrder):
        pass

    if contestant == "fsdp2":
        return InOrder(**given, args=arguments(**args, fsdp=True))
    if contestant == "ddp":
        return UnderDDP(**given, args=arguments(**args))
    capture = "off" if contestant.endswith("eager") else "auto"
    plan = Plan(strategy="fsdp", precision="bf16", capture=capture)
    return UnderShardwise(**given, args=arguments(**args), plan=plan)


def main() -> None:
    out = measuring.RESULTS / "trainer_hf_h200.json"
    defaults = {"cases": list(CASES), "contestants": CONTESTANTS, "limit": 120.0, "tiny": False, "predict": False}
    asked = measuring.options(__doc__, one="", case="", out=out, **defaults)
    if asked.predict:
        for case in asked.cases:
            if CASES[case].rows is any_rows:
                predict(case)
        return None
    if asked.one:
        return workers.tell(measure(asked.case, asked.one, tiny=asked.tiny))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    failed = False
    for case in asked.cases:
        for contestant in asked.contestants:
            options = ["--case", case, "--one", contestant, *(["--tiny"] if asked.tiny else [])]
            try:
                rows = workers.results_of(
                    workers.output_of(*workers.torchrun(1), __file__, *options, limit_seconds=asked.limit)
                )
            except (workers.ProcessFailed, TimeoutExpired) as error:
                print(case, contestant, str(error)[-2500:], flush=True)
                failed = True
                continue
            measuring.show(f"{case}, {contestant}", rows[0])
            kept = None if asked.tiny else asked.out
            measuring.replace_rows(kept, rows, key=lambda row: (row["case"], row["contestant"]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
