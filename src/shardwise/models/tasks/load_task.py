"""Finds the task that a command names."""

import runpy
import traceback
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path

import torch

from shardwise.base.errors import InvalidModel, ShardwiseError
from shardwise.models.catalogue import kind_of, shape_of
from shardwise.models.shapes import TokenShape, TransformersShape
from shardwise.models.tasks.catalogue_task import image_task, token_task
from shardwise.models.tasks.foreign import FOREIGN
from shardwise.models.tasks.task import Task
from shardwise.models.tasks.transformers_task import transformers_task


def load_task(
    reference: str,
    *,
    dataset: str | None = None,
    seq: int | None = None,
    image: int | None = None,
    device: torch.device | str = "cpu",
) -> Task:
    """Return the task of a catalogue model, of your own function, or of another library's model (hf:, timm:, …).

    `dataset` is a spelling of models/data/source.py; without one the task has no data. `seq` and `image` change the
    model's sequence length and image size, or are arguments of your function. With `device="meta"` no weights are
    allocated; models of other libraries are always made so.
    """
    kind, name = kind_of(reference)
    if kind in FOREIGN:
        if dataset is not None:
            raise InvalidModel(f"{reference}: --dataset is for catalogue models; write a python: task with this one")
        return FOREIGN[kind](name, seq=seq, image=image)
    if kind == "python":
        if dataset is not None:
            raise InvalidModel(f"{reference}: --dataset is for catalogue models; this function sets its own")
        given = {"seq": seq, "image": image}
        return _own_task(reference, sizes={name: value for name, value in given.items() if value is not None})
    shape = shape_of(reference)
    for option, value in (("seq", seq), ("image", image)):
        if value is not None and value < 1:
            raise InvalidModel(f"--{option} {value}: must be at least 1")
    if isinstance(shape, TokenShape):
        if image is not None:
            raise InvalidModel(f"{reference} reads tokens: --image has no meaning; use --seq")
        if isinstance(shape, TransformersShape):
            return transformers_task(shape, dataset=dataset, seq=seq, device=device)
        return token_task(shape, dataset=dataset, seq=seq, device=device)
    if seq is not None:
        raise InvalidModel(f"{reference} reads images: --seq has no meaning; use --image")
    shape = shape if image is None else replace(shape, image_size=image)
    return image_task(shape, dataset=dataset, device=device)


def _own_task(reference: str, *, sizes: Mapping[str, int]) -> Task:
    file, colon, function = reference.removeprefix("python:").rpartition(":")
    if not colon or not file or not function:
        raise InvalidModel(f"{reference}: must be python:FILE.py:function")
    if not Path(file).is_file():
        raise InvalidModel(f"{reference}: there is no file {file}")
    try:
        make = runpy.run_path(file, run_name=Path(file).stem).get(function)
        if not callable(make):
            raise InvalidModel(f"{reference}: {file} has no function {function}")
        for name in sizes.keys() - signature(make).parameters.keys():
            raise InvalidModel(f"{reference}: --{name} needs a function that takes it: def {function}({name}=…)")
        task = make(**sizes)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever the user's own file raises
        raise InvalidModel(f"{reference}: {type(error).__name__}: {_where(error, file=file)}") from error
    if not isinstance(task, Task):
        raise InvalidModel(f"{reference}: returned a {type(task).__name__}; it must return a shardwise.Task")
    return task


def _where(error: Exception, *, file: str) -> str:
    """Return the error's message and the last line of the user's file in its traceback."""
    if isinstance(error, SyntaxError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return " ".join(str(error).split()) + place
