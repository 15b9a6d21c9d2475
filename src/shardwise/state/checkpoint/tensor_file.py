"""safetensors files, written piece by piece and read in parts.

    8 bytes, little-endian: length of the header | header, JSON: name → dtype, shape, [begin, end] | the tensors' bytes

The safetensors package writes a file from tensors that are all in memory, and reads one by mapping it, which counts as
memory of the process once touched. Here the header is written from shapes alone, and reads are by position.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.files.data_file import UnreadableFile, open_to_read, parse_json
from shardwise.base.files.object_path import Location, ObjectPath
from shardwise.base.files.object_reader import ObjectReader

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest header that the safetensors package accepts.
_MOST_HEADER_BYTES = 100_000_000


class Sink(Protocol):
    """A target of writes."""

    def write(self, data: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    sink: Sink, entries: Mapping[str, TensorEntry], tensors: Iterable[Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Write a whole file. `tensors` are in the order of `entries`; each may be freed when the next is read."""
    sink.write(memoryview(header_bytes(entries, metadata=metadata)))
    for (name, entry), tensor in zip(entries.items(), tensors, strict=True):
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise AssertionError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} where {entry} was announced")
        if entry.num_bytes:
            sink.write(bytes_of(tensor))


def header_bytes(entries: Mapping[str, TensorEntry], *, metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header, padded so that the tensors begin at a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, entry in entries.items():
        if entry.dtype not in _NAMES:
            raise CheckpointError(f"{name} is of {entry.dtype}, which safetensors files do not hold")
        end = begin + entry.num_bytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a CPU tensor, or of a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _texts(found: Mapping[str, object]) -> dict[str, str]:
    return {name: text for name, text in found.items() if isinstance(text, str)}


class TensorFile:
    """A safetensors file that is open for reading."""

    def __init__(self, file: "DiskReader | ObjectReader", *, path: Location) -> None:
        self._file = file
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self._begins: dict[str, int] = {}
        self._read_header()

    def _read_header(self) -> None:
        num_bytes = self._file.num_bytes
        length = int.from_bytes(self._bytes(8, begin=0), "little") if num_bytes >= 8 else num_bytes
        if num_bytes < 8 or length > min(num_bytes - 8, _MOST_HEADER_BYTES):
            raise CheckpointError(f"{self.path}: is not a safetensors file, or was cut short")
        try:
            header = parse_json(self._bytes(length, begin=8))
            self.metadata = _texts(header.pop("__metadata__", {}))
            for name, item in header.items():
                begin, end = item["data_offsets"]
                entry = TensorEntry(dtype=DTYPES[item["dtype"]], shape=tuple(map(int, item["shape"])))
                if end - begin != entry.num_bytes or not 0 <= begin <= end <= num_bytes - 8 - length:
                    raise ValueError(f"{name} lies outside of the file")
                self.entries[name] = entry
                self._begins[name] = 8 + length + begin
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, UnreadableFile) as error:
            raise CheckpointError(f"{self.path}: its header is malformed ({error})") from error

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.fill(tensor, name, offsets=(0,) * len(entry.shape))
        return tensor

    def fill(self, target: Tensor, name: str, *, offsets: Sequence[int]) -> None:
        """Copy into `target` the elements of a tensor from `offsets` on, as many in each dimension as it has.

        Whole rows of the same dtype are read straight into its memory; otherwise rows are read first, then cut.
        """
        entry = self.entries[name]
        row_bytes = prod(entry.shape[1:]) * entry.dtype.itemsize
        begin = self._begins[name] + (offsets[0] * row_bytes if offsets else 0)
        fits = target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous()
        if fits and target.shape[1:] == entry.shape[1:]:
            self._read(bytes_of(target), begin=begin)
            return
        rows = torch.empty((*target.shape[:1], *entry.shape[1:]), dtype=entry.dtype)
        self._read(bytes_of(rows), begin=begin)
        for dim in range(1, target.dim()):
            rows = rows.narrow(dim, offsets[dim], target.shape[dim])
        target.copy_(rows)

    def _bytes(self, num_bytes: int, *, begin: int) -> bytes:
        content = bytearray(num_bytes)
        self._read(memoryview(content), begin=begin)
        return bytes(content)

    def _read(self, memory: memoryview, *, begin: int) -> None:
        while memory:
            try:
                count = self._file.read_into(memory, begin=begin)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if count == 0:
                raise CheckpointError(f"{self.path}: was cut short")
            memory, begin = memory[count:], begin + count


class DiskReader:
    """A file on a disk, read by position."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size

    def read_into(self, memory: memoryview, *, begin: int) -> int:
        return os.preadv(self._file.fileno(), [memory], begin)


@contextmanager
def opened(path: Location) -> Iterator[TensorFile]:
    """Open a safetensors file for reading."""
    with ExitStack() as held:
        try:
            if isinstance(path, ObjectPath):
                reader: DiskReader | ObjectReader = ObjectReader(path)
            else:
                reader = DiskReader(held.enter_context(os.fdopen(open_to_read(path), "rb", buffering=0)))
        except OSError as error:
            raise _unreadable(path, error) from error
        yield TensorFile(reader, path=path)


@contextmanager
def opened_all(paths: Iterable[Location]) -> Iterator[list[TensorFile]]:
    """Open several files, in the order of `paths`."""
    with ExitStack() as stack:
        yield [stack.enter_context(opened(path)) for path in paths]


def checksum(path: Location) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    try:
        if isinstance(path, ObjectPath):
            for part in path.blocks(0, path.stat().st_size):
                value = zlib.crc32(part, value)
            return value
        with os.fdopen(open_to_read(path), "rb") as file:
            while block := file.read(4 * 2**20):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise _unreadable(path, error) from error
    return value


def _unreadable(path: Location, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror})")
