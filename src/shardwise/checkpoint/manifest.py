"""The manifest: what a checkpoint holds, where each box of each tensor lies, and how to tell that all of it is whole.

One JSON file, written last. Checksums are CRC-32: they find what disks, copies and crashes do to a file, at the speed
of reading it. Against somebody who means harm no checksum helps, since whoever can change a file can change this one.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.boxes import Box, covers
from shardwise.checkpoint.tensor_file import checksum
from shardwise.checkpoint.typed import dtype_name, dtype_of
from shardwise.errors import CheckpointError
from shardwise.regular_file import open_to_read

FILE_NAME = "manifest.json"
FORMAT = "shardwise-checkpoint"
VERSION = 1

# A tensor's name in a checkpoint is its path in nested state dicts, joined as torch.distributed.checkpoint joins it.
MODEL, OPTIMIZER, OWN = "model.", "optimizer.", "own."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A safetensors file beside the manifest."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox(Box):
    """A box, and the file in which it lies."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor by its boxes, which do not overlap and together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is not a tensor, in JSON's types.

    plan        the plan under which it was saved; None for a model that went through no plan
    parameters  name → shape, dtype, of what is trained, in the model's order
    buffers     the same for buffers
    aliases     other names of tied parameters → the name under which they are stored
    optimizer   kind, param groups (by names), and each parameter's state but for the tensors' values; None without one
    progress    what the caller gave, the same on every rank
    own         what each rank gave for itself
    finite      whether no parameter holds a NaN or Inf; written only where it is false
    """

    step: int
    num_ranks: int = 1
    plan: dict[str, Any] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    own: list[dict[str, Any]] = field(default_factory=list)
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensors."""

    contents: Contents
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    def to_bytes(self) -> bytes:
        body = {
            "contents": {
                name: getattr(self.contents, name)
                for name in Contents.__slots__
                if name != "finite" or not self.contents.finite
            },
            "files": {name: {"num_bytes": f.num_bytes, "crc32": f.crc32} for name, f in self.files.items()},
            "tensors": {
                name: {
                    "dtype": dtype_name(tensor.dtype),
                    "shape": tensor.shape,
                    "boxes": [[box.offsets, box.sizes, box.file] for box in tensor.boxes],
                }
                for name, tensor in self.tensors.items()
            },
        }
        text = json.dumps(body, allow_nan=False)
        return json.dumps(
            {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode()), "body": body}, allow_nan=False
        ).encode()

    def metadata(self) -> Metadata:
        """The same for torch.distributed.checkpoint; a tied parameter is there by each of its names."""
        tensors: dict[str, STORAGE_TYPES] = {name: _storage_metadata(t) for name, t in self.tensors.items()}
        for alias, name in self.contents.aliases.items():
            tensors[MODEL + alias] = tensors[MODEL + name]
        return Metadata(tensors)

    def first_name(self, name: str) -> str:
        """The name under which a tensor is stored, given any name of it."""
        first = self.contents.aliases.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        return name if first is None else MODEL + first


def box_key(name: str, box: Box, *, shape: tuple[int, ...]) -> str:
    """The name of a box in its file: the tensor's own where it is all of it."""
    return name if box.sizes == tuple(shape) else f"{name}@{','.join(map(str, box.offsets))}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; one that is missing, damaged or not ours is refused in one line."""
    path = folder / FILE_NAME
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            text = file.read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: is not a checkpoint; it has no {FILE_NAME}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        outer = json.loads(text)
        if outer["format"] != FORMAT or outer["version"] != VERSION:
            raise CheckpointError(f"{path}: is {outer['format']} {outer['version']}; this reads {FORMAT} {VERSION}")
        if zlib.crc32(json.dumps(outer["body"]).encode()) != outer["crc32"]:
            raise CheckpointError(f"{path}: is damaged: it does not have its checksum")
        return _from_body(outer["body"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged or not a manifest ({type(error).__name__}: {error})") from error


def verify_files(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Each file must be there, as long as it was, with the bytes that it had."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            raise CheckpointError(f"{path}: is damaged: {num_bytes} bytes, {expected.num_bytes} were written")
        if checksum(path) != expected.crc32:
            raise CheckpointError(f"{path}: is damaged: its {num_bytes} bytes do not have their checksum")


def _from_body(body: dict[str, Any]) -> Manifest:
    files = {name: StoredFile(**values) for name, values in body["files"].items()}
    tensors = {}
    for name, values in body["tensors"].items():
        boxes = tuple(StoredBox(offsets=tuple(o), sizes=tuple(s), file=file) for o, s, file in values["boxes"])
        shape = tuple(values["shape"])
        for box in boxes:
            if box.file not in files or Path(box.file).name != box.file or not box.inside(shape):
                raise ValueError(f"{name} has a box outside of its files or of its shape")
        if not covers(boxes, shape=shape):
            raise ValueError(f"the boxes of {name} do not cover it, or overlap")
        tensors[name] = StoredTensor(dtype=dtype_of(values["dtype"]), shape=shape, boxes=boxes)
    return Manifest(contents=Contents(**body["contents"]), files=files, tensors=tensors)


def _storage_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in tensor.boxes
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
    )


def box_of(index: MetadataIndex, *, of: StoredTensor) -> StoredBox:
    """The box that a planner means."""
    if index.index is not None and index.index < len(of.boxes) and of.boxes[index.index].offsets == index.offset:
        return of.boxes[index.index]
    return next(box for box in of.boxes if box.offsets == index.offset)
