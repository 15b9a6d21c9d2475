"""Transformers' Trainer and an Accelerate loop: ours against their own DDP. One rank; torchrun starts it."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from comparison import STOCK, Row, Trained, compare, distance
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from shardwise.integrations import ShardwiseAccelerator, ShardwiseTrainer

# Where the row of resumed trainings leaves its checkpoints, and what should come of them.
RESUMED, EXPECTED = "resumed", "expected.pt"
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
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


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


def make_trainer(strategy: str, folder: Path, *, callbacks: Any = (), **options: Any) -> tuple[Any, Losses]:
    losses = Losses()
    settings = {
        "max_steps": 6,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        **options,
    }
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        **settings,
    )
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


def plain(strategy: str, folder: Path) -> Trained:
    trainer, losses = make_trainer(strategy, folder)
    trainer.train()
    return of(trainer, losses)


def recomputed(strategy: str, folder: Path) -> Trained:
    trainer, losses = make_trainer(strategy, folder, gradient_checkpointing=True)
    trainer.train()
    return of(trainer, losses)


def evaluated(strategy: str, folder: Path) -> Trained:
    """Evaluation before and in training, the best model at the end, and its predictions; weights are read from disk."""
    trainer, losses = make_trainer(
        strategy,
        folder,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        # So that the best is not the last.
        metric_for_best_model="loss",
        greater_is_better=True,
        eval_on_start=True,
        lr_scheduler_type="constant",
    )
    trainer.train()
    predicted = trainer.predict(Sentences(5))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    numbers = [*losses.numbers, predicted.metrics["test_loss"], *predicted.predictions.flatten().tolist()]
    best = int(Path(trainer.state.best_model_checkpoint).name.split("-")[-1])
    return Trained(numbers=[*numbers, best], norms=losses.norms, weights=dict(saved.state_dict()))


def resumed(strategy: str, folder: Path) -> Trained:
    """Accumulation, clipping, and a stop after step 3; the rest is trained by another strategy."""
    if strategy == STOCK:
        trainer, losses = make_trainer(strategy, folder, **CLIPPED)
        trainer.train()
        trained = of(trainer, losses)
        if trainer.is_world_process_zero():
            torch.save(trained.weights, folder.parent / EXPECTED)
        return trained
    folder = folder.parent / RESUMED / strategy
    saving = {"save_strategy": "steps", "save_steps": 3}
    first, before = make_trainer(strategy, folder, callbacks=[StopAfter(3)], **saving, **CLIPPED)
    first.train()
    first.accelerator.wait_for_everyone()
    other = {"ddp": "fsdp", "zero2": "ddp", "fsdp": "zero2"}[strategy]
    second, after = make_trainer(other, folder, **saving, **CLIPPED)
    second.train(resume_from_checkpoint=True)
    trained = of(second, before, after)
    whole, losses = make_trainer(strategy, folder, **CLIPPED)
    whole.train()
    assert distance(trained, of(whole, losses)) == 0, "stopped and resumed is not what it is without"
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


ROWS = [
    Row(name="Trainer", run=plain),
    Row(name="Trainer, gradient_checkpointing", run=recomputed),
    Row(name="Trainer, evaluation, best model, predict, save_model", run=evaluated),
    Row(name="Trainer, accumulation, clipping, resumed by another strategy", run=resumed, bound=1e-6),
    Row(name="Accelerator loop, accumulation, clipping, save_state, load_state", run=looped, bound=1e-6),
]

if __name__ == "__main__":
    compare(ROWS)
