"""Hugging Face models with random weights that several benchmarks train."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Classes of transformers, the batch of a rank, and the values of the configuration.

    tokens   of a sample; none where samples are images
    """

    model: str
    config: str
    samples: int
    tokens: int = 0
    ranks: int = 1
    values: dict[str, Any]


def _models_of(table: str) -> dict[str, Model]:
    path = Path(__file__).with_name(table)
    return {name: Model(**row) for name, row in tomllib.loads(path.read_text()).items()}


MODELS = _models_of("hugging_face_models.toml")
LARGE = _models_of("large_models.toml")
VARIED = _models_of("trainer_models.toml")
_ALL = MODELS | LARGE | VARIED
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TINY |= {"num_key_value_heads": 1, "head_dim": 16}


def make_model(name: str, *, device: str, **values: Any) -> nn.Module:
    """Build a model in fp32, to be trained. `values` replace some of its config."""
    import transformers

    known = _ALL[name]
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
    known = _ALL[name]

    def make_batch(size: int) -> dict[str, Tensor]:
        if not known.tokens:
            side = known.values["image_size"]
            labels = torch.randint(known.values["num_labels"], (size,), device=device)
            return {"pixel_values": torch.randn(size, 3, side, side, device=device), "labels": labels}
        ids = torch.randint(5, known.values["vocab_size"], (size, known.tokens), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        given = {key: value for key, value in batch.items() if masked or key != "attention_mask"}
        found: Tensor = model(**{"labels": batch.get("input_ids"), **given}).loss
        return found

    return Task(model=make_model(name, device=device, **values), loss=loss, make_batch=make_batch)
