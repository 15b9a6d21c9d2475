"""Writes a snapshot from memory to disk as an ordinary checkpoint, in a process of its own: no rank stops or writes.

    python -m shardwise.recovery.disk_writer MEMORY START STEP CHECKPOINTS KEEP [finite]

The ranks keep the generation until it is written (recovery.py). All of it must be in the memory of one node.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from shardwise.checkpoint.contents import StatePiece
from shardwise.checkpoint.disk import Disk
from shardwise.checkpoint.folder import begin, commit, discard, prune
from shardwise.checkpoint.manifest import MODEL
from shardwise.checkpoint.parts import CheckpointPart, write_part
from shardwise.checkpoint.ranks import one_line
from shardwise.errors import CheckpointError, DiskFailed
from shardwise.files.object_path import Location, location
from shardwise.recovery.generation import OWN, Record, RecordName, check_totals, elements_of, mapped, read_record


class DiskWriter:
    """The process that writes one generation."""

    def __init__(
        self, memory: Path, *, start: str, step: int, folder: Location, keep: int, finite_only: bool = False
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


def write_generation(
    memory: Path, *, start: str, step: int, folder: Location, keep: int, finite_only: bool
) -> Location:
    """Write a generation as a checkpoint; return its folder."""
    names = [name for path in memory.iterdir() if (name := RecordName.parse(path.name)) is not None]
    wanted = sorted(name for name in names if name.generation == (step, start) and name.kind == OWN)
    if not wanted or [name.rank for name in wanted] != list(range(wanted[0].num_ranks)):
        raise CheckpointError(f"the snapshot of step {step} is not whole in {memory}")
    disk = Disk()
    saving = begin(folder, step=step, disk=disk)
    try:
        parts = [_write(read_record(memory, name), memory, saving=saving, disk=disk) for name in wanted]
        whole = reduce(CheckpointPart.merged, parts)
        if finite_only and not whole.contents.finite:
            raise CheckpointError("a parameter holds a NaN or Inf")
        path = commit(saving, whole.manifest(), disk=disk)
    except BaseException:
        discard(saving, disk=disk)
        raise
    for line in prune(folder, keep=keep, newest=path, disk=disk):
        print(f"shardwise: {line}", flush=True)
    return path


def _write(record: Record, memory: Path, *, saving: Location, disk: Disk) -> CheckpointPart:
    """Write the file of one rank."""
    content = mapped(memory, record)
    check_totals(record, memory=content)
    pieces = [
        StatePiece(name=piece.name, shape=piece.shape, start=piece.start, elements=elements_of(piece, memory=content))
        for piece in record.pieces
    ]
    floats = [one.elements for one in pieces if one.name.startswith(MODEL) and one.elements.is_floating_point()]
    finite = all(bool(torch.isfinite(elements).all()) for elements in floats)
    contents = replace(record.contents, finite=finite)
    return write_part(pieces, contents=contents, rank=record.name.rank, folder=saving, disk=disk)


def main() -> None:
    # The ranks come first.
    os.nice(10)
    memory, start, step, folder, keep, *options = sys.argv[1:]
    try:
        write_generation(
            Path(memory),
            start=start,
            step=int(step),
            folder=location(folder),
            keep=int(keep),
            finite_only=bool(options),
        )
    except (CheckpointError, OSError) as error:
        sys.exit(one_line(error))


if __name__ == "__main__":
    main()
