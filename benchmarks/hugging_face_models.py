"""Hugging Face models with random weights that several benchmarks train."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tasks import Task

_LLAMA_LIKE = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_cache": False}
# Name → class of the model and of its config, samples, tokens, config.
MODELS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3ForCausalLM", "Qwen3Config", 2, 1024,
        {**_LLAMA_LIKE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "max_position_embeddings": 40960},
    ),
    "gemma3-1b": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", 2, 1024,
        {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
         "query_pre_attn_scalar": 256, "max_position_embeddings": 131072, "use_cache": False},
    ),
    "bert-large": (
        "BertForMaskedLM", "BertConfig", 16, 256,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 30522},
    ),
    "llama-1b": (
        "LlamaForCausalLM", "LlamaConfig", 2, 2048,
        {**_LLAMA_LIKE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
         "max_position_embeddings": 131072},
    ),
}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TINY |= {"num_key_value_heads": 1, "head_dim": 16}


def samples_of(name: str) -> int:
    return MODELS[name][2]


def make_model(name: str, *, device: str, **values: Any) -> nn.Module:
    """Build a model in fp32, to be trained. `values` replace some of its config."""
    import transformers

    kind, config_kind, _, _, config = MODELS[name]
    made = getattr(transformers, config_kind)(**{**config, **values})
    with torch.device(device):
        model: nn.Module = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa")
    return model.float().train()


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return (model, tokens, a mask of ones) on the GPU."""
    _, _, samples, tokens, config = MODELS[name]
    torch.manual_seed(0)
    model = make_model(name, device="cuda")
    ids = torch.randint(5, config["vocab_size"], (samples, tokens), device="cuda")
    return model, ids, torch.ones_like(ids)


def task_of(name: str, *, device: str, masked: bool = False, **values: Any) -> Task:
    """Return the model as a Task. `masked`: the mask of ones is given to the model."""
    _, _, _, tokens, config = MODELS[name]

    def make_batch(size: int) -> dict[str, Tensor]:
        ids = torch.randint(5, config["vocab_size"], (size, tokens), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        found: Tensor = model(**(batch if masked else {"input_ids": ids}), labels=ids).loss
        return found

    return Task(model=make_model(name, device=device, **values), loss=loss, make_batch=make_batch)
