"""Tasks of models of Hugging Face, timm and torchvision, on the meta device."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import InvalidModel, MissingExtra, UnknownName
from shardwise.spec.kept import config_folder
from shardwise.tasks import Task, cross_entropy, load_task

_DEFAULT_SEQ = 2048
_DEFAULT_IMAGE = 224


def task_of(reference: str, *, seq: int | None, image: int | None) -> Task:
    """Return the task of any MODEL, if possible without making weights."""
    kind, colon, name = reference.partition(":")
    if colon and kind in _MAKERS:
        return _MAKERS[kind](name, seq=seq, image=image)
    return load_task(reference, seq=seq, image=image, device="meta")


def _imported(package: str, *, needed_for: str, extra: str | None) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra.of(package, needed_for=needed_for, extra=extra) from error


def hugging_face_task(folder: str, *, seq: int | None, image: int | None) -> Task:
    """Return next-token prediction with the model of a local config.json, given by its path or its folder."""
    folder = config_folder(folder)
    if image is not None:
        raise InvalidModel(f"hf:{folder} reads tokens: --image has no meaning; use --seq")
    if not Path(folder, "config.json").is_file():
        raise InvalidModel(f"hf:{folder}: there is no {Path(folder, 'config.json')}")
    transformers = _imported("transformers", needed_for="hf:", extra="hf")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise InvalidModel(f"hf:{folder}: {' '.join(str(error).split())[:300]}") from error
    model.config.use_cache = False
    model.train()
    length = seq or min(_DEFAULT_SEQ, getattr(config, "max_position_embeddings", _DEFAULT_SEQ))

    def make_batch(size: int) -> dict[str, Tensor]:
        tokens = torch.zeros(size, length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    return Task(model=model, loss=_own_loss, make_batch=make_batch, tokens_per_sample=length)


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def _image_task(package: str, extra: str | None, name: str, *, seq: int | None, image: int | None) -> Task:
    """Return image classification with a model of timm or torchvision."""
    if seq is not None:
        raise InvalidModel(f"{package}:{name} reads images: --seq has no meaning; use --image")
    make, size = _LIBRARIES[package](name, image, extra)
    with torch.device("meta"):
        model = make()
    model.train()

    def make_batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(count, 3, size, size), torch.zeros(count, dtype=torch.int64)

    return Task(model=model, loss=cross_entropy, make_batch=make_batch)


def _timm(name: str, image: int | None, extra: str | None) -> tuple[Callable[[], nn.Module], int]:
    timm = _imported("timm", needed_for="timm:", extra=extra)
    if not timm.is_model(name):
        raise UnknownName.of("timm model", name, known=timm.list_models())
    default = timm.get_pretrained_cfg(name)
    size = image or (default.input_size[-1] if default is not None else _DEFAULT_IMAGE)
    options = {"img_size": size} if image is not None and "vit" in name else {}
    return partial(timm.create_model, name, pretrained=False, **options), size


def _torchvision(name: str, image: int | None, extra: str | None) -> tuple[Callable[[], nn.Module], int]:
    models = _imported("torchvision", needed_for="torchvision:", extra=extra).models
    if name not in models.list_models():
        raise UnknownName.of("torchvision model", name, known=models.list_models())
    return partial(models.get_model, name, weights=None), image or _DEFAULT_IMAGE


_LIBRARIES = {"timm": _timm, "torchvision": _torchvision}
_MAKERS: dict[str, Callable[..., Task]] = {
    "hf": hugging_face_task,
    "timm": partial(_image_task, "timm", "vision"),
    "torchvision": partial(_image_task, "torchvision", None),
}
