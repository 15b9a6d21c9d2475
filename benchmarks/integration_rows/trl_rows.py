"""TRL's SFT and DPO trainers, whole and with LoRA: ours against their own DDP. One rank; torchrun starts it."""

from functools import partial
from pathlib import Path
from typing import Any

from comparison import STOCK, Trained, compare
from datasets import Dataset
from hf_rows import Losses, make_model, of, settings
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
    args = config(**settings(folder), bf16=False, gradient_checkpointing=False, max_steps=4)
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
    return of(trainer, losses)


ROWS = {
    f"TRL {'DPO' if dpo else 'SFT'}Trainer{' + LoRA' if lora else ''}": (partial(train, dpo=dpo, lora=lora), 0.0)
    for dpo in (False, True)
    for lora in (False, True)
}

if __name__ == "__main__":
    compare(ROWS)
