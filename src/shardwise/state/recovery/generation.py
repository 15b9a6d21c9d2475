"""One rank's snapshot of one step: a data file in memory, and a record that says what it holds.

    START.SLOT.RANK.KIND.state                  the pieces' bytes, each from a multiple of 64 on
    START.STEP.RANK.NUM_RANKS.KIND.json         written when the data are whole, removed before they change

START names the start of the ranks that wrote it. KIND is `own`, or `copy` for what a rank of another node keeps.
Both kinds list all pieces of the rank; a copy holds only those that no other node has.
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.files.data_file import UnreadableFile, open_to_read, parse_json, read_at_most
from shardwise.state.checkpoint.contents import StatePiece
from shardwise.state.checkpoint.manifest import Contents
from shardwise.state.checkpoint.typed import dtype_name, dtype_of

OWN, COPY = "own", "copy"
_ALIGNMENT = 64
_MOST_RECORD_BYTES = 2**28


class NoRoom(Exception):  # noqa: N818
    """The file system in memory has no room for a snapshot of `num_bytes`."""

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        super().__init__(str(path))
        self.path, self.num_bytes = path, num_bytes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RecordName:
    """The name of a record; it says which generation a file belongs to without being read."""

    step: int
    start: str
    rank: int
    num_ranks: int
    kind: str

    def __str__(self) -> str:
        return f"{self.start}.{self.step:08}.{self.rank:05}.{self.num_ranks:05}.{self.kind}.json"

    @property
    def generation(self) -> tuple[int, str]:
        return self.step, self.start

    @classmethod
    def parse(cls, name: str) -> "RecordName | None":
        """Return None for a name of another form."""
        parts = name.split(".")
        if (
            len(parts) != 6
            or parts[4] not in (OWN, COPY)
            or parts[5] != "json"
            or not all(map(str.isdigit, parts[1:4]))
        ):
            return None
        start, step, rank, num_ranks, kind, _ = parts
        return cls(start=start, step=int(step), rank=int(rank), num_ranks=int(num_ranks), kind=kind)


def start_of_file(name: str) -> str:
    """Return which start wrote a file of a generation; "" for any other file."""
    start, *parts = name.split(".")
    return start if (len(parts), parts[-1:]) in ((4, ["state"]), (5, ["json"])) else ""


def data_name(*, start: str, slot: int, rank: int, kind: str) -> str:
    return f"{start}.{slot}.{rank:05}.{kind}.state"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Some elements of a flattened tensor, and where they lie in the data file; `begin` is None if they are not in it.

    total   the sum of its bytes as 64-bit integers: it changes with every byte that changes
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    count: int
    begin: int | None
    total: int = 0

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a rank's snapshot holds. `data` is the name of its data file."""

    name: RecordName
    data: str
    contents: Contents
    pieces: tuple[StoredPiece, ...]

    def to_text(self) -> str:
        body = {
            "data": self.data,
            "contents": {name: getattr(self.contents, name) for name in Contents.__slots__},
            "pieces": [
                [piece.name, dtype_name(piece.dtype), piece.shape, piece.start, piece.count, piece.begin, piece.total]
                for piece in self.pieces
            ],
        }
        text = json.dumps(body)
        return f"{zlib.crc32(text.encode())}\n{text}"


def read_record(folder: Path, name: RecordName) -> Record:
    """Read a record; raise CheckpointError, in one line, if it is damaged."""
    try:
        checksum, _, text = read_at_most(folder / str(name), _MOST_RECORD_BYTES).partition(b"\n")
        if int(checksum) != zlib.crc32(text):
            raise ValueError("checksum")
        body: dict[str, Any] = parse_json(text, finite=False)
        pieces = tuple(
            StoredPiece(
                name=piece,
                dtype=dtype_of(dtype),
                shape=tuple(shape),
                start=start,
                count=count,
                begin=begin,
                total=total,
            )
            for piece, dtype, shape, start, count, begin, total in body["pieces"]
        )
        return Record(name=name, data=body["data"], contents=Contents(**body["contents"]), pieces=pieces)
    except (OSError, ValueError, KeyError, TypeError, UnreadableFile) as error:
        raise CheckpointError(f"the snapshot of rank {name.rank}, step {name.step}, is damaged: its record") from error


def laid_out(pieces: Sequence[StatePiece], *, left_out: Iterable[bool] | None = None) -> list[StoredPiece]:
    """Return the pieces' places in a data file, one after another. Those that are left out get none."""
    stored, begin = [], 0
    for piece, absent in zip(pieces, left_out or (False,) * len(pieces), strict=True):
        one = StoredPiece(
            name=piece.name,
            dtype=piece.elements.dtype,
            shape=piece.shape,
            start=piece.start,
            count=piece.elements.numel(),
            begin=None if absent else begin,
        )
        stored.append(one)
        begin += 0 if absent else _padded(one.num_bytes)
    return stored


def size_of(pieces: Iterable[StoredPiece]) -> int:
    """Return the bytes of a data file."""
    return sum(_padded(piece.num_bytes) for piece in pieces if piece.begin is not None)


class DataFile:
    """A data file that is mapped into memory; `memory` are its bytes, `pinned` for copies from a GPU."""

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        self.path, self.num_bytes, self.pinned = path, num_bytes, False
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Now, and zeroed: a write to memory that is not there would kill the process.
            os.posix_fallocate(descriptor, 0, max(1, num_bytes))
            self._map = mmap.mmap(descriptor, max(1, num_bytes))
        except OSError as error:
            path.unlink()
            raise NoRoom(path, num_bytes=num_bytes) from error
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)


def mapped(folder: Path, record: Record) -> Tensor:
    """Return the bytes of a record's data file. Raises CheckpointError if it is not there, or too short."""
    needed = size_of(record.pieces)
    try:
        descriptor = open_to_read(folder / record.data)
        try:
            if os.fstat(descriptor).st_size < needed:
                raise OSError("is too short")
            # Private: torch wants memory that can be written.
            content = mmap.mmap(
                descriptor, max(1, needed), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"the snapshot of rank {record.name.rank}, step {record.name.step}, is damaged: its data file"
        ) from error
    return torch.frombuffer(content, dtype=torch.uint8)


def begin_of(piece: StoredPiece) -> int:
    """Return where a piece begins in its data file."""
    assert piece.begin is not None
    return piece.begin


def elements_of(piece: StoredPiece, *, memory: Tensor) -> Tensor:
    """Return a piece's elements, in the memory of its data file."""
    begin = begin_of(piece)
    return memory[begin : begin + piece.num_bytes].view(piece.dtype)


def with_total(piece: StoredPiece, *, memory: Tensor) -> StoredPiece:
    """Return the piece with the sum of its bytes, and of the zeros after it."""
    if piece.begin is None or not piece.num_bytes:
        return piece
    words = memory[piece.begin : piece.begin + _padded(piece.num_bytes)].view(torch.int64)
    # torch would add up on all cores, which training may need, and have each wait for the slowest.
    return replace(piece, total=int(words.numpy().sum()))


def check_totals(record: Record, *, memory: Tensor) -> None:
    """Raise CheckpointError if a byte of the data has changed."""
    for piece in record.pieces:
        inside = prod(piece.shape) >= piece.start + piece.count
        if not inside or with_total(piece, memory=memory) != piece:
            raise CheckpointError(
                f"the snapshot of rank {record.name.rank}, step {record.name.step}, is damaged: {piece.name} does not "
                "have its checksum"
            )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
