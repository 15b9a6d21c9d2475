"""TRL's SFT and DPO trainers, whole and with LoRA: ours against their own DDP. One rank; torchrun starts it."""

from pathlib import Path
from typing import Any

from comparison import STOCK, Row, Trained, compare
from datasets import Dataset
from hf_rows import Losses, make_model
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from shardwise.integrations import ShardwiseMixin


class ShardwiseSFT(ShardwiseMixin, SFTTrainer):
    pass


class ShardwiseDPO(ShardwiseMixin, DPOTrainer):
    pass


def make_tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 32)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def words(start: int, num_words: int) -> str:
    return " ".join(f"w{(start + 3 * number) % 30 + 2}" for number in range(num_words))


def train(strategy: str, folder: Path, *, dpo: bool, lora: bool) -> Trained:
    stock, ours, config = (DPOTrainer, ShardwiseDPO, DPOConfig) if dpo else (SFTTrainer, ShardwiseSFT, SFTConfig)
    losses = Losses()
    args = config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )
    samples = range(20)
    data = (
        {
            "prompt": [words(n, 3) for n in samples],
            "chosen": [" " + words(n + 3, 4) for n in samples],
            "rejected": [" " + words(n + 9, 4) for n in samples],
        }
        if dpo
        else {"text": [words(n, 4 + n % 4) for n in samples]}
    )
    given: dict[str, Any] = {
        "model": make_model(),
        "args": args,
        "train_dataset": Dataset.from_dict(data),
        "processing_class": make_tokenizer(),
        "callbacks": [losses],
    }
    if dpo and not lora:
        given["ref_model"] = make_model()
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = stock(**given) if strategy == STOCK else ours(**given, plan=strategy)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return Trained(
        numbers=losses.numbers,
        norms=losses.norms,
        weights=dict(trainer.accelerator.get_state_dict(trainer.model)),
    )


def sft(strategy: str, folder: Path) -> Trained:
    return train(strategy, folder, dpo=False, lora=False)


def sft_lora(strategy: str, folder: Path) -> Trained:
    return train(strategy, folder, dpo=False, lora=True)


def dpo(strategy: str, folder: Path) -> Trained:
    return train(strategy, folder, dpo=True, lora=False)


def dpo_lora(strategy: str, folder: Path) -> Trained:
    return train(strategy, folder, dpo=True, lora=True)


ROWS = [
    Row(name="TRL SFTTrainer", run=sft),
    Row(name="TRL SFTTrainer + LoRA", run=sft_lora),
    Row(name="TRL DPOTrainer", run=dpo),
    Row(name="TRL DPOTrainer + LoRA", run=dpo_lora),
]

if __name__ == "__main__":
    compare(ROWS)
