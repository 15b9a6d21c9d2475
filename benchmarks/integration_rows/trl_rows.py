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
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from shardwise.integrations import ShardwiseMixin


class ShardwiseSFT(ShardwiseMixin, SFTTrainer):
    pass


class ShardwiseDPO(ShardwiseMixin, DPOTrainer):
    pass


class ShardwiseGRPO(ShardwiseMixin, GRPOTrainer):
    pass


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make_tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 32)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def words(start: int, num_words: int) -> str:
    return " ".join(f"w{(start + 3 * number) % 30 + 2}" for number in range(num_words))


def train(strategy: str, folder: Path, *, dpo: bool, lora: bool, **options: Any) -> Trained:
    stock, ours, config = (DPOTrainer, ShardwiseDPO, DPOConfig) if dpo else (SFTTrainer, ShardwiseSFT, SFTConfig)
    losses = Losses()
    args = config(**settings(folder), bf16=False, gradient_checkpointing=False, max_steps=4, **options)
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
        given["peft_config"] = LORA
    trainer = stock(**given) if strategy == STOCK else ours(**given, plan=strategy)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return of(trainer, losses)


def rewarded(strategy: str, folder: Path) -> Trained:
    """GRPO: the model inside LoRA's wrapper generates, and its words are rewarded."""
    losses = Losses()
    generating = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1}
    args = GRPOConfig(**settings(folder), bf16=False, gradient_checkpointing=False, max_steps=3, **generating)
    given: dict[str, Any] = {
        "model": make_model(),
        "args": args,
        "reward_funcs": lambda completions, **_: [float(len(set(one.split()))) for one in completions],
        "train_dataset": Dataset.from_dict({"prompt": [words(n, 3) for n in range(20)]}),
        "processing_class": make_tokenizer(),
        "callbacks": [losses],
        "peft_config": LORA,
    }
    trainer = GRPOTrainer(**given) if strategy == STOCK else ShardwiseGRPO(**given, plan=strategy)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return of(trainer, losses)


ROWS = {
    f"TRL {'DPO' if dpo else 'SFT'}Trainer{' + LoRA' if lora else ''}": (partial(train, dpo=dpo, lora=lora), 0.0)
    for dpo in (False, True)
    for lora in (False, True)
}
SYNCHRONISED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
ROWS["TRL DPOTrainer, sync_ref_model"] = (partial(train, dpo=True, lora=False, **SYNCHRONISED), 0.0)
ROWS["TRL GRPOTrainer + LoRA"] = (rewarded, 0.0)

if __name__ == "__main__":
    compare(ROWS)
