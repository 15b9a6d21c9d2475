"""The name of a dataset → its training split and its evaluation split.

stdlib          byte tokens of the Python standard library's source files
tokens:PATH     a token file (`shardwise tokens`)
text:PATH       a text file, or a .jsonl file with one "text" per line, by the model's tokenizer, or by bytes
digits          scikit-learn's handwritten digits
images:DIR      a folder with one folder of images per class, or one that holds two such folders, train/ and val/
hf:NAME         a Hugging Face dataset, or a folder that its `save_to_disk` wrote
random          random samples, to measure speed and memory

A path is looked up from the working directory; errors show where that was.
"""

from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from shardwise.base.errors import InvalidData, UnknownName
from shardwise.models.data.hub import HubDataset
from shardwise.models.data.images import Digits, ImageFolder, RandomImages
from shardwise.models.data.text import byte_encoding, encode_files, stdlib_tokens, tokenizer_encoding
from shardwise.models.data.tokens import RandomTokens, TokenWindows, open_tokens

_NUM_RANDOM_SAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Samples to train on, and samples of the same kind that are held out for evaluation."""

    training: Dataset[Any]
    evaluation: Dataset[Any]


def token_splits(reference: str, *, seq: int, vocab_size: int, tokenizer: Path | None = None) -> Splits:
    """Return windows of `seq` tokens, all below `vocab_size`; the last tenth of the text is held out.

    tokenizer   a tokenizer.json for text:PATH; without one, bytes are tokens
    """
    kind, _, argument = reference.partition(":")
    if kind == "hf":
        return _hub_splits(argument, input_column="input_ids", target_column="labels")
    if kind == "random":
        return _hold_out_every_tenth(RandomTokens(_NUM_RANDOM_SAMPLES, seq=seq, vocab_size=vocab_size))
    tokens: NDArray[Any]
    if kind == "stdlib":
        tokens, least_vocab = stdlib_tokens(), 256
    elif kind == "tokens":
        file = open_tokens(Path(argument).absolute())
        tokens, least_vocab = file.tokens, file.vocab_size
    elif kind == "text":
        encoding = byte_encoding() if tokenizer is None else tokenizer_encoding(tokenizer)
        pieces = [piece for piece, _ in encode_files([Path(argument).absolute()], encoding=encoding)]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)
        least_vocab = int(tokens.max(initial=0)) + 1
    else:
        known = ("stdlib", "text:PATH", "tokens:PATH", "hf:NAME", "random")
        raise UnknownName.of("dataset of tokens", reference, known=known)
    if least_vocab > vocab_size:
        raise InvalidData(
            f"{reference}: has a vocabulary of {least_vocab}, the model one of {vocab_size}: "
            "choose a model or a tokenizer to match"
        )
    cut = len(tokens) - max(len(tokens) // 10, seq + 1)
    if cut <= seq:
        raise InvalidData(f"{reference}: has {len(tokens)} tokens; two samples of {seq} need {2 * seq + 2}")
    return Splits(
        training=TokenWindows(tokens[:cut], seq=seq, name=reference),
        evaluation=TokenWindows(tokens[cut:], seq=seq, name=reference),
    )


def image_splits(reference: str, *, image_size: int, num_channels: int, num_classes: int) -> Splits:
    """Return images [channels, size, size] with labels below `num_classes`."""
    kind, _, argument = reference.partition(":")
    if kind == "hf":
        return _hub_splits(argument, input_column="image", target_column="label")
    if kind == "digits":
        if (image_size, num_channels) != (8, 1):
            raise InvalidData(
                f"digits: has images of 8 × 8 pixels and 1 channel, the model takes {image_size} × "
                f"{image_size} and {num_channels}: choose vit-digits or resnet-digits, or --image 8"
            )
        splits, found = Splits(training=Digits(), evaluation=Digits(evaluation=True)), Digits.num_classes
    elif kind == "images":
        splits, found = _folder_splits(Path(argument).absolute(), image_size=image_size, num_channels=num_channels)
    elif kind == "random":
        images = RandomImages(
            _NUM_RANDOM_SAMPLES, image_size=image_size, num_channels=num_channels, num_classes=num_classes
        )
        splits, found = _hold_out_every_tenth(images), num_classes
    else:
        raise UnknownName.of("dataset of images", reference, known=("digits", "images:DIR", "hf:NAME", "random"))
    if found > num_classes:
        raise InvalidData(f"{reference}: has {found} classes, the model {num_classes}")
    return splits


def _folder_splits(folder: Path, *, image_size: int, num_channels: int) -> tuple[Splits, int]:
    def opened(path: Path) -> ImageFolder:
        return ImageFolder(path, image_size=image_size, num_channels=num_channels)

    if (folder / "train").is_dir() and (folder / "val").is_dir():
        training, evaluation = opened(folder / "train"), opened(folder / "val")
        if training.classes != evaluation.classes:
            raise InvalidData(f"{folder}: train/ and val/ do not hold the same classes")
        return Splits(training=training, evaluation=evaluation), training.num_classes
    images = opened(folder)
    return _hold_out_every_tenth(images), images.num_classes


def _hold_out_every_tenth(dataset: Dataset[Any]) -> Splits:
    assert isinstance(dataset, Sized)
    indices = range(len(dataset))
    return Splits(
        training=Subset(dataset, [index for index in indices if index % 10]),
        evaluation=Subset(dataset, [index for index in indices if index % 10 == 0]),
    )


def _hub_splits(reference: str, *, input_column: str, target_column: str) -> Splits:
    def split(name: str) -> HubDataset:
        return HubDataset(reference, split=name, input_column=input_column, target_column=target_column)

    try:
        evaluation = split("validation")
    except InvalidData:
        evaluation = split("test")
    return Splits(training=split("train"), evaluation=evaluation)
