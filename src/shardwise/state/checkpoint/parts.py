"""The part of a checkpoint that one rank writes: its file, and what the manifest says of it.

Slices of flat buffers need no plan that all ranks make together: each rank knows which elements it writes, and no other
rank writes the same ones (contents.py). So each writes its file at once. What the manifest says of the files is merged
from rank to rank along a tree, in as many rounds as the logarithm of the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise.base.errors import CheckpointError
from shardwise.base.files.object_path import Location
from shardwise.state.checkpoint.boxes import Boxes
from shardwise.state.checkpoint.contents import StatePiece
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.folder import write_file
from shardwise.state.checkpoint.manifest import (
    MOST_LISTED_SLICES,
    Contents,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    box_key,
    file_of,
)
from shardwise.state.checkpoint.slice_runs import SliceRun, cover, merged_runs
from shardwise.state.checkpoint.tensor_file import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """What one rank has written, or several that follow each other."""

    contents: Contents
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    def merged(self, after: "CheckpointPart") -> "CheckpointPart":
        """Return both as one; the other is of the ranks after these."""
        tensors = dict(self.tensors)
        for name, tensor in after.tensors.items():
            known = tensors.get(name)
            tensors[name] = tensor if known is None else _both(known, tensor)
        return CheckpointPart(
            contents=_both_contents(self.contents, after.contents), files=self.files | after.files, tensors=tensors
        )

    def manifest(self) -> Manifest:
        """Return the manifest of what all ranks have written; raise CheckpointError unless it holds every element."""
        for name, tensor in self.tensors.items():
            if prod(tensor.shape) and not cover(tensor.runs, num_elements=prod(tensor.shape)):
                raise CheckpointError(f"{name}: the slices of the ranks do not cover it, or overlap")
        tensors = dict(sorted(self.tensors.items()))
        if sum(run.count for tensor in tensors.values() for run in tensor.runs) <= MOST_LISTED_SLICES:
            tensors = {name: tensor.with_boxes_listed() for name, tensor in tensors.items()}
        return Manifest(contents=self.contents, files=self.files, tensors=tensors)


def describe_pieces(pieces: Sequence[StatePiece], *, rank: int) -> dict[str, StoredTensor]:
    """Return what the manifest says of the pieces in a rank's file."""
    tensors: dict[str, StoredTensor] = {}
    for piece in pieces:
        tensor = StoredTensor(dtype=piece.elements.dtype, shape=piece.shape)
        if piece.elements.numel():
            run = SliceRun(start=piece.start, size=piece.elements.numel(), rank=rank)
            tensors[piece.name] = replace(tensor, runs=(run,))
        else:
            # A box without elements, so that the checkpoint lists the tensor.
            box = StoredBox(offsets=(0,) * len(piece.shape), sizes=piece.shape, file=file_of(rank))
            tensors[piece.name] = replace(tensor, listed=(box,))
    return tensors


def write_part(
    pieces: Sequence[StatePiece], *, contents: Contents, rank: int, folder: Location, disk: Disk
) -> CheckpointPart:
    """Write a rank's file, if it has pieces; it is on disk when this returns."""
    entries: dict[str, TensorEntry] = {}
    boxed = []
    for piece in pieces:
        boxes = Boxes(piece.elements, shape=piece.shape, start=piece.start)
        for box in boxes.boxes:
            entries[box_key(piece.name, box, shape=piece.shape)] = TensorEntry(
                dtype=piece.elements.dtype, shape=box.sizes
            )
            boxed.append((boxes, MetadataIndex(piece.name, torch.Size(box.offsets))))
    parts = (boxes.__get_tensor_shard__(index).detach().cpu() for boxes, index in boxed)
    files = {}
    if entries:
        files[file_of(rank)] = write_file(folder / file_of(rank), entries, parts, disk=disk)
    return CheckpointPart(contents=contents, files=files, tensors=describe_pieces(pieces, rank=rank))


def _both(one: StoredTensor, other: StoredTensor) -> StoredTensor:
    return replace(one, listed=one.listed + other.listed, runs=merged_runs((*one.runs, *other.runs)))


def _both_contents(one: Contents, other: Contents) -> Contents:
    """Merge the contents of ranks: each has its own values, and the states of the parameters that it holds."""
    optimizer: dict[str, Any] | None = one.optimizer
    if optimizer is not None:
        theirs: Mapping[str, Any] = (other.optimizer or {}).get("state", {})
        optimizer = {**optimizer, "state": {**optimizer["state"], **theirs}}
    return replace(
        one,
        num_ranks=one.num_ranks + other.num_ranks,
        optimizer=optimizer,
        own=[*one.own, *other.own],
        finite=one.finite and other.finite,
    )


def merged_contents(everyone: Sequence[Contents]) -> Contents:
    """Merge the contents of all ranks."""
    first, *others = everyone
    for other in others:
        first = _both_contents(first, other)
    return first
