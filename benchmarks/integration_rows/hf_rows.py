"""Transformers' Trainer and an Accelerate loop: ours against their own DDP. One rank; torchrun starts it.

Started on one rank, it finishes what two ranks have begun: a Trainer's checkpoint on another number of ranks.
"""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from comparison import OTHER, STOCK, Trained, asked, compare, distance, write
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from shardwise.integrations import ShardwiseAccelerator, ShardwiseMixin, ShardwiseTrainer

# Where the row of resumed trainings leaves its checkpoints, and what should come of them.
RESUMED, EXPECTED = "resumed", "expected.pt"
_TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}


class Sentences(Dataset):
    """Tokens that can be learned, of two lengths."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(8) * (index % 5 + 1) + index) % 32
        labels = ids.clone()
        labels[: index % 3] = -100
        return {"input_ids": ids, "labels": labels}


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_TINY, tie_word_embeddings=True, use_cache=False))


class Losses(TrainerCallback):
    """What the Trainer logged."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        self.numbers += [value for key, value in logs.items() if key in ("loss", "eval_loss")]
        self.norms += [value for key, value in logs.items() if key == "grad_norm"]


class StopAfter(TrainerCallback):
    """As if the job had been stopped there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def settings(folder: Path) -> dict[str, Any]:
    """Arguments that all trainers have, those of TRL too."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_nan_inf_filter": False, "logging_steps": 1}
    training = {"learning_rate": 1e-2, "max_grad_norm": 0.0, "per_device_train_batch_size": 2, "save_strategy": "no"}
    return {"output_dir": str(folder), "use_cpu": True, **quiet, **training}


def make_trainer(strategy: str, folder: Path, *, callbacks: Any = (), **options: Any) -> tuple[Any, Losses]:
    losses = Losses()
    args = TrainingArguments(**settings(folder) | {"max_steps": 6, "weight_decay": 0.1} | options)
    given = {
        "model": make_model(),
        "args": args,
        "train_dataset": Sentences(40),
        "eval_dataset": Sentences(6),
        "callbacks": [losses, *callbacks],
    }
    trainer = Trainer(**given) if strategy == STOCK else ShardwiseTrainer(**given, plan=strategy)
    trainer.remove_callback(PrinterCallback)
    return trainer, losses


def of(trainer: Any, *told: Losses) -> Trained:
    return Trained(
        numbers=[number for losses in told for number in losses.numbers],
        norms=[norm for losses in told for norm in losses.norms],
        weights=dict(trainer.accelerator.get_state_dict(trainer.model)),
    )


def plain(strategy: str, folder: Path, **options: Any) -> Trained:
    trainer, losses = make_trainer(strategy, folder, **options)
    trainer.train()
    return of(trainer, losses)


def evaluated(strategy: str, folder: Path) -> Trained:
    """Evaluation before and in training, the best model at the end, and its predictions; weights are read from disk."""
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "lr_scheduler_type": "constant"}
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    # The largest loss counts as the best, so that the best is not the last.
    best = {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer, losses = make_trainer(strategy, folder, **evaluating, **saving, **best)
    trainer.train()
    predicted = trainer.predict(Sentences(5))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    numbers = [*losses.numbers, predicted.metrics["test_loss"], *predicted.predictions.flatten().tolist()]
    step = int(Path(trainer.state.best_model_checkpoint).name.split("-")[-1])
    return Trained(numbers=[*numbers, step], norms=losses.norms, weights=dict(saved.state_dict()))


def resumed(strategy: str, folder: Path) -> Trained:
    """Accumulation, clipping, and a stop after step 3; the rest is trained by another strategy."""
    if strategy == STOCK:
        trained = plain(strategy, folder, **CLIPPED)
        if os.environ["RANK"] == "0":
            torch.save(trained.weights, folder.parent / EXPECTED)
        return trained
    folder = folder.parent / RESUMED / strategy
    saving = {"save_strategy": "steps", "save_steps": 3}
    first, before = make_trainer(strategy, folder, callbacks=[StopAfter(3)], **saving, **CLIPPED)
    first.train()
    first.accelerator.wait_for_everyone()
    second, after = make_trainer(OTHER[strategy], folder, **saving, **CLIPPED)
    second.train(resume_from_checkpoint=True)
    trained = of(second, before, after)
    assert distance(trained, plain(strategy, folder, **CLIPPED)) == 0, "a run that was resumed differs"
    return trained


def looped(strategy: str, folder: Path) -> Trained:
    """An Accelerate loop with accumulation and clipping, saved in the middle and loaded into other objects."""
    numbers: list[float] = []
    norms: list[float] = []

    def objects() -> Any:
        options = {"cpu": True, "gradient_accumulation_steps": 2}
        accelerator = Accelerator(**options) if strategy == STOCK else ShardwiseAccelerator(**options, plan=strategy)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(Sentences(32), batch_size=2)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            numbers.append(float(loss.detach()))

    accelerator, model, optimizer, loader = objects()
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    accelerator, model, optimizer, loader = objects()
    accelerator.load_state(str(folder))
    train(accelerator, model, optimizer, loader)
    assert accelerator.unwrap_model(model).config.vocab_size == 32
    return Trained(numbers=numbers, norms=norms, weights=dict(accelerator.get_state_dict(model)))


class SavesAlone(TrainerCallback):
    """Rank 0 saves in the middle of a training, the usual way; under fsdp the other ranks help with the state."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **options: Any) -> None:
        if state.global_step != 3:
            return
        given = {"state_dict": model.state_dict()} if self.strategy == "fsdp" else {}
        if state.is_world_process_zero:
            model.save_pretrained(self.folder, **given)
            with torch.no_grad():
                # Under fsdp this needs all ranks, too.
                _ = model(torch.ones(1, 3, dtype=torch.int64)) if self.strategy != "fsdp" else None


def saved_alone(strategy: str, folder: Path) -> Trained:
    """Weights are those of both files."""
    trainer, losses = make_trainer(strategy, folder, callbacks=[SavesAlone(strategy, folder / "middle")])
    trainer.train()
    if strategy == "fsdp" or trainer.is_world_process_zero():
        trainer.save_model(str(folder / "end"))
    trainer.accelerator.wait_for_everyone()
    weights = {
        f"{name} {key}": value
        for name in ("middle", "end")
        for key, value in LlamaForCausalLM.from_pretrained(folder / name).state_dict().items()
    }
    return Trained(numbers=losses.numbers, norms=losses.norms, weights=weights)


class ShardwiseSeq2Seq(ShardwiseMixin, Seq2SeqTrainer):
    pass


class Pairs(Sentences):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "labels": torch.arange(1, 5) + index % 3}


def translated(strategy: str, folder: Path) -> Trained:
    """An encoder-decoder that generates in evaluation and prediction."""
    losses = Losses()
    generating = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}
    training = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    given = {
        "model": T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)),
        "args": Seq2SeqTrainingArguments(**settings(folder) | training | generating),
        "train_dataset": Pairs(20),
        "eval_dataset": Pairs(6),
        "compute_metrics": lambda found: {"sum": float(found.predictions.sum())},
        "callbacks": [losses],
    }
    trainer = Seq2SeqTrainer(**given) if strategy == STOCK else ShardwiseSeq2Seq(**given, plan=strategy)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    predicted = trainer.predict(Pairs(5)).predictions
    trained = of(trainer, losses)
    return Trained(numbers=[*trained.numbers, *predicted.flatten().tolist()], weights=trained.weights)


def finished_on_one_rank() -> None:
    """Finish on one rank what `resumed` has begun on two."""
    folder, strategies = asked()
    stock = Trained(numbers=[], weights=torch.load(folder / EXPECTED))
    distances = {}
    for strategy in strategies:
        begun = folder / RESUMED / strategy
        for path in begun.glob("checkpoint-*"):
            if path.name != "checkpoint-3":
                shutil.rmtree(path)
        # As many samples per step as on two ranks.
        trainer, losses = make_trainer(strategy, begun, per_device_train_batch_size=4, **CLIPPED)
        trainer.train(resume_from_checkpoint=True)
        assert len(losses.numbers) == 3, losses.numbers
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        distances[strategy] = distance(Trained(numbers=[], weights=weights), stock)
    write({"Trainer, begun on 2 ranks and finished on 1": {"bound": 1e-6, "distance": distances}})


ROWS = {
    "Trainer": (plain, 0.0),
    "Trainer, gradient_checkpointing": (partial(plain, gradient_checkpointing=True), 0.0),
    "Trainer, evaluation, best model, predict, save_model": (evaluated, 0.0),
    "Trainer, accumulation, clipping, resumed by another strategy": (resumed, 1e-6),
    "Accelerator loop, accumulation, clipping, save_state, load_state": (looped, 1e-6),
    "Trainer, rank 0 saves (`fsdp`: a state of all ranks)": (saved_alone, 0.0),
    "Seq2SeqTrainer, T5, predict_with_generate": (translated, 0.0),
}

if __name__ == "__main__":
    if os.environ["WORLD_SIZE"] == "1":
        finished_on_one_rank()
    else:
        compare(ROWS)
