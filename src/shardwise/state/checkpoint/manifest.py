"""The manifest of a checkpoint: its contents, the place of each box of each tensor, and the checksums of its files.

One JSON file, written last. Version 1 lists every box. Thousands of ranks write more of them than one file can list;
version 2 then lists slices (slice_runs.py), from which the boxes follow.

Checksums are CRC-32: they detect damage by disks, copies and crashes at the speed of reading. They do not protect
against an attacker, who could change the manifest as well.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.base.errors import CheckpointError
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.base.files.form import (
    WrongForm,
    anything,
    each,
    number,
    optional,
    record,
    row,
    string,
    switch,
    table,
    whole,
)
from shardwise.base.files.object_path import Location
from shardwise.state.checkpoint.boxes import Box, covers, cut, flat_index
from shardwise.state.checkpoint.slice_runs import SliceRun, cover, slices_between
from shardwise.state.checkpoint.tensor_file import checksum
from shardwise.state.checkpoint.typed import dtype_name, dtype_of

FILE_NAME = "manifest.json"
FORMAT = "shardwise-checkpoint"
_LISTS_BOXES, _LISTS_SLICES = 1, 2

# A million boxes take about 100 MiB.
_MOST_BYTES = 2**30
# Of more slices than these, a new manifest does not list the boxes.
MOST_LISTED_SLICES = 50_000

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
    """A tensor by its boxes, which cover it without overlap: they are listed, or follow from runs of slices."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    listed: tuple[StoredBox, ...] = ()
    runs: tuple[SliceRun, ...] = ()

    def boxes(self) -> Iterator[StoredBox]:
        """Yield all boxes."""
        return self.boxes_between(0, prod(self.shape))

    def boxes_between(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield at least the boxes that hold elements `start` to `stop` of the flattened tensor."""
        yield from self.listed
        for begin, end, rank in slices_between(self.runs, start=start, stop=stop):
            for box in cut(self.shape, start=begin, stop=end):
                yield StoredBox(offsets=box.offsets, sizes=box.sizes, file=file_of(rank))

    def box_at(self, offsets: Sequence[int]) -> StoredBox:
        """Return the box that begins at these offsets."""
        start = flat_index(offsets, self.shape)
        return next(box for box in self.boxes_between(start, start + 1) if box.offsets == tuple(offsets))

    def with_boxes_listed(self) -> "StoredTensor":
        return replace(self, listed=tuple(self.boxes()), runs=())

    def to_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"dtype": dtype_name(self.dtype), "shape": self.shape}
        if self.runs:
            return body | {"slices": [[run.start, run.size, run.rank, run.count, run.stride] for run in self.runs]}
        return body | {"boxes": [[box.offsets, box.sizes, box.file] for box in self.listed]}


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
            "tensors": {name: tensor.to_body() for name, tensor in self.tensors.items()},
        }
        version = _LISTS_SLICES if any(tensor.runs for tensor in self.tensors.values()) else _LISTS_BOXES
        text = json.dumps(body, allow_nan=False)
        outer = json.dumps({"format": FORMAT, "version": version, "crc32": zlib.crc32(text.encode())})
        return f'{outer[:-1]}, "body": {text}}}'.encode()

    def metadata(self, wanted: Mapping[str, tuple[int, int]] | None = None) -> Metadata:
        """Return it for torch.distributed.checkpoint, with a tied parameter under each of its names.

        wanted   tensor → the first and last element of it that will be read, of the flattened tensor: other tensors,
                 and boxes of which nothing is read, may be left out
        """
        if wanted is None:
            aliases = {MODEL + alias: MODEL + name for alias, name in self.contents.aliases.items()}
            names = [*self.tensors, *aliases]
            wanted = {name: (0, prod(self.tensors[self.first_name(name)].shape)) for name in names}
        return Metadata(
            {
                name: _storage_metadata(self.tensors[first], start=start, stop=stop)
                for name, (start, stop) in wanted.items()
                if (first := self.first_name(name)) in self.tensors
            }
        )

    def first_name(self, name: str) -> str:
        """Return the name under which a tensor is stored, given any of its names."""
        first = self.contents.aliases.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        return name if first is None else MODEL + first


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def box_key(name: str, box: Box, *, shape: tuple[int, ...]) -> str:
    """Return the name of a box in its file: the tensor's own name if the box is the whole tensor."""
    return name if box.sizes == tuple(shape) else f"{name}@{','.join(map(str, box.offsets))}"


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint; raise, in one line, if it is missing, damaged or not ours."""
    path = folder / FILE_NAME
    try:
        # A user's progress may hold NaN.
        outer = read_json(path, most_bytes=_MOST_BYTES, finite=False)
    except UnreadableFile as error:
        if error.is_missing:
            raise CheckpointError(f"{folder}: is not a checkpoint; it has no {FILE_NAME}") from error
        raise CheckpointError(f"{path}: {error}") from error
    try:
        if outer["format"] != FORMAT or outer["version"] not in (_LISTS_BOXES, _LISTS_SLICES):
            raise CheckpointError(
                f"{path}: is {outer['format']} {outer['version']}; this reads {FORMAT} {_LISTS_BOXES} and "
                f"{_LISTS_SLICES}"
            )
        if zlib.crc32(json.dumps(outer["body"]).encode()) != outer["crc32"]:
            raise CheckpointError(f"{path}: is damaged: it does not have its checksum")
        return _from_body(outer["body"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, WrongForm) as error:
        raise CheckpointError(f"{path}: is damaged or not a manifest ({type(error).__name__}: {error})") from error


def verify_files(folder: Location, files: Mapping[str, StoredFile]) -> None:
    """Raise unless each file exists, with the length and the checksum that were written."""
    for name, expected in files.items():
        path = folder / name
        try:
            if not path.is_file():
                raise CheckpointError(f"{path}: is missing")
            num_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
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
_SLICES = each(row(whole(least=0), whole(least=1), whole(least=0), whole(least=1), whole()))


def _from_body(body: dict[str, Any]) -> Manifest:
    """Return the manifest; check all types first: one from elsewhere can have a valid checksum and any content."""
    _CONTENTS(body["contents"], "contents")
    files = {name: StoredFile(**values) for name, values in _FILES(body["files"], "files").items()}
    for name in files:
        if not _is_plain_name(name):
            raise ValueError(f"{name[:100]!r} is not a file that a checkpoint has")
    tensors = {}
    for name, values in body["tensors"].items():
        dtype, shape = dtype_of(values["dtype"]), tuple(values["shape"])
        if not all(type(size) is int for size in shape):
            raise ValueError(f"{name} has a shape that is not of whole numbers")
        if "slices" in values:
            runs = _runs(values["slices"], name=name, num_elements=prod(shape), files=files)
            tensors[name] = StoredTensor(dtype=dtype, shape=shape, runs=runs)
        else:
            tensors[name] = StoredTensor(
                dtype=dtype, shape=shape, listed=_boxes(values["boxes"], name=name, shape=shape, files=files)
            )
    return Manifest(contents=Contents(**body["contents"]), files=files, tensors=tensors)


def _boxes(values: Any, *, name: str, shape: tuple[int, ...], files: Collection[str]) -> tuple[StoredBox, ...]:
    boxes = tuple(StoredBox(offsets=tuple(o), sizes=tuple(s), file=file) for o, s, file in values)
    for box in boxes:
        if not all(type(size) is int for size in (*box.offsets, *box.sizes)):
            raise ValueError(f"{name} has a shape that is not of whole numbers")
        if box.file not in files or not box.inside(shape):
            raise ValueError(f"{name} has a box outside of its files or of its shape")
    if not covers(boxes, shape=shape):
        raise ValueError(f"the boxes of {name} do not cover it, or overlap")
    return boxes


def _runs(values: Any, *, name: str, num_elements: int, files: Collection[str]) -> tuple[SliceRun, ...]:
    _SLICES(values, name)
    num_files = len(files) if file_of(len(files) - 1) in files else 0
    runs = tuple(
        SliceRun(start=start, size=size, rank=rank, count=count, stride=stride)
        for start, size, rank, count, stride in values
    )
    if not cover(runs, num_elements=num_elements):
        raise ValueError(f"the slices of {name} do not cover it, or overlap")
    for run in runs:
        ends = (run.rank, run.rank + (run.count - 1) * run.stride)
        # By their ends where all ranks have a file: a large checkpoint has millions of slices.
        if not (min(ends) >= 0 and max(ends) < num_files) and any(file_of(rank) not in files for rank in run.ranks):
            raise ValueError(f"{name} has a slice outside of its files")
    return runs


def _is_plain_name(name: str) -> bool:
    """Return whether a name is of a file in the checkpoint's folder, and printable in one line."""
    return name != "" and Path(name).name == name and name.isprintable() and len(name.encode()) <= 255


def _storage_metadata(tensor: StoredTensor, *, start: int, stop: int) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
        for box in tensor.boxes_between(start, stop)
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
    )


def box_of(index: MetadataIndex, *, of: StoredTensor) -> StoredBox:
    """Return the box that a planner refers to."""
    if index.index is not None and index.index < len(of.listed) and of.listed[index.index].offsets == index.offset:
        return of.listed[index.index]
    assert index.offset is not None
    return of.box_at(index.offset)
