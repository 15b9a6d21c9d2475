"""Writes a snapshot from memory to disk as an ordinary checkpoint, in a process of its own: no rank stops or writes.

    python -m shardwise.recovery.disk_writer MEMORY START STEP CHECKPOINTS KEEP [finite]

The ranks keep the generation until it is written (recovery.py). All of it must be in the memory of one node.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise.checkpoint.boxes import Boxes
from shardwise.checkpoint.disk import Disk
from shardwise.checkpoint.folder import begin, commit, discard, prune, write_file
from shardwise.checkpoint.manifest import MODEL, Manifest, StoredBox, StoredFile, StoredTensor, box_key
from shardwise.checkpoint.ranks import one_line
from shardwise.checkpoint.storage import merged
from shardwise.checkpoint.tensor_file import TensorEntry
from shardwise.errors import CheckpointError, DiskFailed
from shardwise.recovery.generation import OWN, Record, RecordName, check_totals, elements_of, mapped, read_record


class DiskWriter:
    """The process that writes one generation."""

    def __init__(
        self, memory: Path, *, start: str, step: int, folder: Path, keep: int, finite_only: bool = False
    ) -> None:
        self.step = step
        words = [str(memory), start, str(step), str(folder), str(keep), *(["finite"] if finite_only else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardwise.recovery.disk_writer", *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Not one of rank 0's processes, which its launcher signals and kills with it.
            start_new_session=True,
        )

    def is_done(self, *, wait: bool = False) -> bool:
        """Return whether the checkpoint is on disk; raise DiskFailed if it could not be written."""
        if not wait and self._process.poll() is None:
            return False
        _, said = self._process.communicate()
        if self._process.returncode:
            line = (said.strip().splitlines() or ["the process that wrote it was killed"])[-1]
            raise DiskFailed(f"the checkpoint of step {self.step} was not written: {line}")
        return True


def write_generation(memory: Path, *, start: str, step: int, folder: Path, keep: int, finite_only: bool) -> Path:
    """Write a generation as a checkpoint; return its folder."""
    names = [name for path in memory.iterdir() if (name := RecordName.parse(path.name)) is not None]
    wanted = sorted(name for name in names if name.generation == (step, start) and name.kind == OWN)
    if not wanted or [name.rank for name in wanted] != list(range(wanted[0].num_ranks)):
        raise CheckpointError(f"the snapshot of step {step} is not whole in {memory}")
    disk = Disk()
    saving = begin(folder, step=step, disk=disk)
    try:
        files: dict[str, StoredFile] = {}
        tensors: dict[str, StoredTensor] = {}
        contents, finite = [], True
        for name in wanted:
            record = read_record(memory, name)
            contents.append(record.contents)
            file = f"rank-{name.rank:05}.safetensors"
            files[file], is_finite = _write(record, memory, saving / file, tensors=tensors, disk=disk)
            finite = finite and is_finite
        if finite_only and not finite:
            raise CheckpointError("a parameter holds a NaN or Inf")
        manifest = Manifest(contents=replace(merged(contents), finite=finite), files=files, tensors=tensors)
        path = commit(saving, manifest, disk=disk)
    except BaseException:
        discard(saving, disk=disk)
        raise
    prune(folder, keep=keep, newest=path, disk=disk)
    return path


def _write(
    record: Record, memory: Path, path: Path, *, tensors: dict[str, StoredTensor], disk: Disk
) -> tuple[StoredFile, bool]:
    """Write the file of one rank and add its boxes to `tensors`; return the file, and whether parameters are finite."""
    content = mapped(memory, record)
    check_totals(record, memory=content)
    entries, parts, finite = {}, [], True
    for piece in record.pieces:
        elements = elements_of(piece, memory=content)
        if piece.name.startswith(MODEL) and elements.is_floating_point():
            finite = finite and bool(torch.isfinite(elements).all())
        boxes = Boxes(elements, shape=piece.shape, start=piece.start)
        known = tensors.get(piece.name, StoredTensor(dtype=piece.dtype, shape=piece.shape, boxes=()))
        stored = [StoredBox(offsets=box.offsets, sizes=box.sizes, file=path.name) for box in boxes.boxes]
        tensors[piece.name] = replace(known, boxes=(*known.boxes, *stored))
        for box in boxes.boxes:
            entries[box_key(piece.name, box, shape=piece.shape)] = TensorEntry(dtype=piece.dtype, shape=box.sizes)
            parts.append(boxes.__get_tensor_shard__(MetadataIndex(piece.name, torch.Size(box.offsets))))
    return write_file(path, entries, parts, disk=disk), finite


def main() -> None:
    # The ranks come first.
    os.nice(10)
    memory, start, step, folder, keep, *options = sys.argv[1:]
    try:
        write_generation(
            Path(memory), start=start, step=int(step), folder=Path(folder), keep=int(keep), finite_only=bool(options)
        )
    except (CheckpointError, OSError) as error:
        sys.exit(one_line(error))


if __name__ == "__main__":
    main()
