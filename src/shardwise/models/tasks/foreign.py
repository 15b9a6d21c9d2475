"""Tasks of models of Hugging Face, timm and torchvision, on the meta device."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel, UnknownName
from shardwise.models.tasks.task import Task, cross_entropy
from shardwise.models.tasks.transformers_task import folder_task
from shardwise.models.transformers_model import imported

_DEFAULT_IMAGE = 224


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
    timm = imported("timm", needed_for="timm:", extra=extra)
    if not timm.is_model(name):
        raise UnknownName.of("timm model", name, known=timm.list_models())
    default = timm.get_pretrained_cfg(name)
    size = image or (default.input_size[-1] if default is not None else _DEFAULT_IMAGE)
    options = {"img_size": size} if image is not None and "vit" in name else {}
    return partial(timm.create_model, name, pretrained=False, **options), size


def _torchvision(name: str, image: int | None, extra: str | None) -> tuple[Callable[[], nn.Module], int]:
    models = imported("torchvision", needed_for="torchvision:", extra=extra).models
    if name not in models.list_models():
        raise UnknownName.of("torchvision model", name, known=models.list_models())
    return partial(models.get_model, name, weights=None), image or _DEFAULT_IMAGE


_LIBRARIES = {"timm": _timm, "torchvision": _torchvision}
FOREIGN: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "hf": folder_task,
        "timm": partial(_image_task, "timm", "vision"),
        "torchvision": partial(_image_task, "torchvision", None),
    }
)
"""Kind of MODEL → what makes its task."""
