"""The manifest of a checkpoint: its contents, the place of each box of each tensor, and the checksums of its files.

One JSON file, written last. Checksums are CRC-32: they detect damage by disks, copies and crashes at the speed of
reading. They do not protect against an attacker, who could change the manifest as well.
"""

import json
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
from shardwise.files.form import WrongForm, anything, each, number, optional, record, row, string, switch, table, whole
from shardwise.files.regular_file import read_at_most

FILE_NAME = "manifest.json"
FORMAT = "shardwise-checkpoint"
VERSION = 1

# A million boxes take about 100 MiB.
_MOST_BYTES = 2**30

# A tensor's name in a checkpoint is its path in nested state dicts, joined as in torch.distributed.checkpoint.
MODEL, OPTIMIZER, EMA_OF, OWN = "model.", "optimizer.", "ema.", "own."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A safetensors file next to the manifest."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox(Box):
    """A box, and the file that holds it."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor by its boxes, which cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The part of a checkpoint that is not a tensor, in JSON's types.

    plan        the plan under which it was saved; None for a model that was not prepared
    parameters  name → shape and dtype of each parameter, in the model's order
    buffers     the same for buffers
    aliases     other names of tied parameters → the name under which they are stored
    optimizer   kind, param groups (by names), and each parameter's state without the values of tensors; or None
    ema         decay, num_updates and parameter names of an exponential moving average; left out if there is none
    progress    values from the caller, the same on every rank
    own         values from the caller of each rank
    finite      whether no parameter holds a NaN or Inf; left out if true
    """

    step: int
    num_ranks: int = 1
    plan: dict[str, Any] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    own: list[dict[str, Any]] = field(default_factory=list)
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without the values of its tensors."""

    contents: Contents
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    def to_bytes(self) -> bytes:
        body = {
            "contents": {
                name: getattr(self.contents, name)
                for name in Contents.__slots__
                if not (name == "finite" and self.contents.finite) and not (name == "ema" and self.contents.ema is None)
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
        """Return it for torch.distributed.checkpoint, with a tied parameter under each of its names."""
        tensors: dict[str, STORAGE_TYPES] = {name: _storage_metadata(t) for name, t in self.tensors.items()}
        for alias, name in self.contents.aliases.items():
            tensors[MODEL + alias] = tensors[MODEL + name]
        return Metadata(tensors)

    def first_name(self, name: str) -> str:
        """Return the name under which a tensor is stored, given any of its names."""
        first = self.contents.aliases.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        return name if first is None else MODEL + first


def box_key(name: str, box: Box, *, shape: tuple[int, ...]) -> str:
    """Return the name of a box in its file: the tensor's own name if the box is the whole tensor."""
    return name if box.sizes == tuple(shape) else f"{name}@{','.join(map(str, box.offsets))}"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise, in one line, if it is missing, damaged or not ours."""
    path = folder / FILE_NAME
    try:
        text = read_at_most(path, _MOST_BYTES)
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, WrongForm) as error:
        raise CheckpointError(f"{path}: is damaged or not a manifest ({type(error).__name__}: {error})") from error


def verify_files(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Raise unless each file exists, with the length and the checksum that were written."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            raise CheckpointError(f"{path}: is damaged: {num_bytes} bytes, {expected.num_bytes} were written")
        if checksum(path) != expected.crc32:
            raise CheckpointError(f"{path}: is damaged: its {num_bytes} bytes do not have their checksum")


_DESCRIBED = table(row(each(whole(least=0)), string))
_CONTENTS = record(
    may_lack=[name for name in Contents.__slots__ if name != "step"],
    step=whole(least=0),
    num_ranks=whole(least=1, below=2**31),
    # Another version may have written other keys; check the ones that are shown.
    plan=optional(
        record(others=True, may_lack=["mesh"], strategy=string, mesh=record(replicate=whole(), shard=whole()))
    ),
    parameters=_DESCRIBED,
    buffers=_DESCRIBED,
    aliases=table(string),
    optimizer=optional(record(others=True, kind=string)),
    ema=optional(record(others=True, decay=number(), num_updates=whole(), parameters=each(string))),
    progress=table(anything),
    own=each(table(anything)),
    finite=switch,
)
_FILES = table(record(num_bytes=whole(least=0), crc32=whole(least=0)))


def _from_body(body: dict[str, Any]) -> Manifest:
    """Return the manifest; check all types first: one from elsewhere can have a valid checksum and any content."""
    _CONTENTS(body["contents"], "contents")
    files = {name: StoredFile(**values) for name, values in _FILES(body["files"], "files").items()}
    for name in files:
        if not _is_plain_name(name):
            raise ValueError(f"{name[:100]!r} is not a file that a checkpoint has")
    tensors = {}
    for name, values in body["tensors"].items():
        boxes = tuple(StoredBox(offsets=tuple(o), sizes=tuple(s), file=file) for o, s, file in values["boxes"])
        shape = tuple(values["shape"])
        for box in boxes:
            if not all(type(size) is int for size in (*shape, *box.offsets, *box.sizes)):
                raise ValueError(f"{name} has a shape that is not of whole numbers")
            if box.file not in files or not box.inside(shape):
                raise ValueError(f"{name} has a box outside of its files or of its shape")
        if not covers(boxes, shape=shape):
            raise ValueError(f"the boxes of {name} do not cover it, or overlap")
        tensors[name] = StoredTensor(dtype=dtype_of(values["dtype"]), shape=shape, boxes=boxes)
    return Manifest(contents=Contents(**body["contents"]), files=files, tensors=tensors)


def _is_plain_name(name: str) -> bool:
    """Return whether a name is of a file in the checkpoint's folder, and printable in one line."""
    return name != "" and Path(name).name == name and name.isprintable() and len(name.encode()) <= 255


def _storage_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in tensor.boxes
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
    )


def box_of(index: MetadataIndex, *, of: StoredTensor) -> StoredBox:
    """Return the box that a planner refers to."""
    if index.index is not None and index.index < len(of.boxes) and of.boxes[index.index].offsets == index.offset:
        return of.boxes[index.index]
    return next(box for box in of.boxes if box.offsets == index.offset)
