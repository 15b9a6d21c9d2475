"""Tiny models with random weights: one of each architecture, from transformers' and timm's own classes."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scenario_rows.optimizers import Training
from scenario_rows.runners import Runner, Weights
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
BATCH, LENGTH, VOCABULARY, CLASSES, IMAGE = 2, 12, 64, 2, 32
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# Tokens that lie outside of a small vocabulary, of which TOML cannot say that there are none.
_TINY = {**TABLE["tiny"], "suppress_tokens": None, "begin_suppress_tokens": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`make` builds the model as it is initialised; `batch` gives one rank's inputs of a step."""

    class_name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def _hugging_face_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    assert isinstance(loss, Tensor)
    return loss.mean()


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


# What models are given, by kind.


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY - 4, (BATCH, length), generator=generator)


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=generator)


def _text(generator: torch.Generator, *, length: int = LENGTH) -> Batch:
    tokens = _tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _classified(generator: torch.Generator, *, name: str, shape: tuple[int, ...]) -> Batch:
    return {name: torch.randn(BATCH, *shape, generator=generator), "labels": _labels(generator)}


def _speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": _tokens(generator)}


def _captions(generator: torch.Generator) -> Batch:
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": images, "return_loss": torch.tensor(True)}


def _series(generator: torch.Generator) -> Batch:
    values = torch.randn(BATCH, 20, 2, generator=generator)
    return {"past_values": values[:, :16], "future_values": values[:, 16:]}


_INPUTS: dict[str, Callable[[torch.Generator], Batch]] = {
    "text": _text,
    "long_text": partial(_text, length=32),
    "pairs": _pairs,
    "images": partial(_classified, name="pixel_values", shape=(3, IMAGE, IMAGE)),
    "speech": _speech,
    "sound": partial(_classified, name="input_values", shape=(800,)),
    "spectrogram": partial(_classified, name="input_values", shape=(32, 16)),
    "captions": _captions,
    "series": _series,
}


def _hugging_face(*, model: str, batch: Callable[[torch.Generator], Batch], **values: Any) -> Architecture:
    def make() -> nn.Module:
        transformers = __import__("transformers")
        kind = getattr(transformers, model)
        default = kind.config_class()
        known = {name: value for name, value in _TINY.items() if name in vars(default) or name in default.attribute_map}
        config = kind.config_class(**{**known, "num_labels": CLASSES, **values})
        _without_chance(config)
        torch.manual_seed(0)
        made: nn.Module = kind(config)
        return made.train()

    return Architecture(class_name=model, make=make, batch=batch, loss=_hugging_face_loss)


def _without_chance(config: Any) -> None:
    """No dropout: ranks draw other numbers than one process does."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_chance(value)


def _timm(*, model: str, size: int = 64, **values: Any) -> Architecture:
    def make() -> nn.Module:
        timm = __import__("timm")
        torch.manual_seed(0)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        made: nn.Module = timm.create_model(model, pretrained=False, num_classes=CLASSES, **given)
        return made.train()

    batch = partial(_classified, name="images", shape=(3, size, size))
    return Architecture(class_name=model, make=make, batch=batch, loss=_image_loss)


ARCHITECTURES: dict[str, Architecture] = {
    **{
        f"hf:{name}": _hugging_face(batch=_INPUTS[kind], **values)
        for kind, rows in TABLE["transformers"].items()
        for name, values in rows.items()
    },
    **{f"timm:{name}": _timm(**values) for name, values in TABLE["timm"].items()},
}


def train(runner: Runner, architecture: Architecture) -> Weights:
    """Take three steps; return the parameters. Not with Adam, which makes much of a gradient that is only rounding."""
    model = architecture.make()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(called: nn.Module, step: int, share: int) -> Tensor:
        return architecture.loss(called, architecture.batch(torch.Generator().manual_seed(100 * step + share)))

    weights = Training(runner, model, optimizer).train(3, loss)
    return {name: weights[name] for name in names}


ROWS: dict[str, Callable[[Runner], Weights]] = {
    name: partial(train, architecture=architecture) for name, architecture in ARCHITECTURES.items()
}
