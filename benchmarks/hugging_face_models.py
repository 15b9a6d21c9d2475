"""Hugging Face models with random weights that several benchmarks train."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Classes of transformers, the batch, and the values of the configuration."""

    model: str
    config: str
    samples: int
    tokens: int
    values: dict[str, Any]


_TABLE = Path(__file__).with_suffix(".toml")
MODELS = {name: Model(**row) for name, row in tomllib.loads(_TABLE.read_text()).items()}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TINY |= {"num_key_value_heads": 1, "head_dim": 16}


def make_model(name: str, *, device: str, **values: Any) -> nn.Module:
    """Build a model in fp32, to be trained. `values` replace some of its config."""
    import transformers

    known = MODELS[name]
    made = getattr(transformers, known.config)(**{**known.values, **values})
    with torch.device(device):
        model: nn.Module = getattr(transformers, known.model)._from_config(made, attn_implementation="sdpa")
    return model.float().train()


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return (model, tokens, a mask of ones) on the GPU."""
    torch.manual_seed(0)
    model, known = make_model(name, device="cuda"), MODELS[name]
    ids = torch.randint(5, known.values["vocab_size"], (known.samples, known.tokens), device="cuda")
    return model, ids, torch.ones_like(ids)


def task_of(name: str, *, device: str, masked: bool = False, **values: Any) -> Task:
    """Return the model as a Task. `masked`: the mask of ones is given to the model."""
    known = MODELS[name]

    def make_batch(size: int) -> dict[str, Tensor]:
        ids = torch.randint(5, known.values["vocab_size"], (size, known.tokens), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        found: Tensor = model(**(batch if masked else {"input_ids": ids}), labels=ids).loss
        return found

    return Task(model=make_model(name, device=device, **values), loss=loss, make_batch=make_batch)
