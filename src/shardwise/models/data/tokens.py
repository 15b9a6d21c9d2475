"""Memory-mapped token files: `NAME.bin` holds the tokens, `NAME.idx` describes them.

    NAME.bin    little-endian uint16 or uint32, nothing else
    NAME.idx    8 bytes "SWTOKENS", the header's length (uint64), a JSON header
                (version, dtype, num_tokens, num_documents, vocab_size, tokenizer),
                then for each document the position after its last token (uint64)

The index is written last: an interrupted write leaves no index, and opening the pair raises an error.
"""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.base.errors import InvalidData, ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, parse_json, read_content
from shardwise.base.files.form import record, string, whole

TokenPiece = tuple[NDArray[Any], bool]
"""Consecutive token numbers, and whether a document ends with them."""

_MAGIC = b"SWTOKENS"
_VERSION = 1
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_REWRITE = "write it again with `shardwise tokens`"
# 8 bytes per document.
_MOST_INDEX_BYTES = 2**33
_COUNT = whole(least=1)
_HEADER = record(
    others=True,
    version=whole(),
    dtype=string,
    tokenizer=string,
    num_tokens=_COUNT,
    num_documents=_COUNT,
    vocab_size=_COUNT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """An open pair of files. `tokens` is memory-mapped, not read."""

    path: Path
    tokens: NDArray[Any]
    document_ends: NDArray[np.uint64]
    vocab_size: int
    tokenizer: str


def write_tokens(
    path: str | os.PathLike[str], pieces: Iterable[TokenPiece], *, vocab_size: int, tokenizer: str
) -> TokenFile:
    """Write documents as a pair of files and open it. Only one piece at a time is in memory."""
    binary, index = _pair(path)
    name = "uint16" if vocab_size <= 2**16 else "uint32"
    ends: list[int] = []
    num_tokens = 0
    try:
        with atomic_write(binary) as file:
            for tokens, ends_document in pieces:
                if tokens.size and int(tokens.max()) >= vocab_size:
                    raise InvalidData(f"token {int(tokens.max())} in a vocabulary of {vocab_size}")
                file.write(tokens.astype(_DTYPES[name]).tobytes())
                num_tokens += tokens.size
                if ends_document:
                    ends.append(num_tokens)
            if not num_tokens:
                raise InvalidData(f"{binary}: there is not one token to write: the input is empty")
            # The old index does not describe the new tokens.
            index.unlink(missing_ok=True)
        header = {"version": _VERSION, "dtype": name, "num_tokens": num_tokens, "num_documents": len(ends)}
        encoded = json.dumps(header | {"vocab_size": vocab_size, "tokenizer": tokenizer}).encode()
        with atomic_write(index) as file:
            file.write(_MAGIC + struct.pack("<Q", len(encoded)) + encoded + np.array(ends, dtype="<u8").tobytes())
    except OSError as error:
        raise InvalidData(f"{binary}: cannot be written ({error.strerror})") from error
    return open_tokens(binary)


def open_tokens(path: str | os.PathLike[str]) -> TokenFile:
    """Open a pair of files by the name of either, or without suffix; files that do not match raise an error."""
    binary, index = _pair(path)
    header, ends = _read_index(index)
    dtype = _DTYPES[header["dtype"]]
    try:
        num_bytes = binary.stat().st_size
        if num_bytes != header["num_tokens"] * dtype.itemsize:
            raise InvalidData(
                f"{binary}: has {num_bytes} bytes, its index says {header['num_tokens']} tokens of "
                f"{dtype.itemsize} bytes: {_REWRITE}"
            )
        tokens = np.memmap(binary, dtype=dtype, mode="r")
    except OSError as error:
        raise InvalidData(f"{binary}: cannot be read ({error.strerror})") from error
    described = {name: header[name] for name in ("vocab_size", "tokenizer")}
    return TokenFile(path=binary, tokens=tokens, document_ends=ends, **described)


def _pair(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    stem = Path(path)
    if stem.suffix in (".bin", ".idx"):
        stem = stem.with_suffix("")
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def _read_index(path: Path) -> tuple[dict[str, Any], NDArray[np.uint64]]:
    try:
        data = read_content(path, most_bytes=_MOST_INDEX_BYTES)
    except UnreadableFile as error:
        raise InvalidData(f"{path}: {error}") from error
    try:
        if data[:8] != _MAGIC:
            raise ValueError("it does not start as one")
        (length,) = struct.unpack_from("<Q", data, 8)
        header = parse_json(data[16 : 16 + length])
        ends = np.frombuffer(data[16 + length :], dtype="<u8")
        _check_index(header, ends)
    except (ValueError, LookupError, TypeError, struct.error, ShardwiseError) as error:
        raise InvalidData(f"{path}: is not a complete token index ({error}): {_REWRITE}") from error
    return header, ends


def _check_index(header: dict[str, Any], ends: NDArray[np.uint64]) -> None:
    _HEADER(header, "its header")
    if header["version"] != _VERSION:
        raise ValueError(f"version {header['version']}, this is version {_VERSION}")
    if header["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {header['dtype']}")
    if len(ends) != header["num_documents"] or int(ends[-1]) != header["num_tokens"] or (np.diff(ends) < 0).any():
        raise ValueError("its documents do not add up to its tokens")


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of `seq` tokens; the target is the window shifted by one token."""

    def __init__(self, tokens: NDArray[Any], *, seq: int, name: str = "tokens") -> None:
        if len(tokens) <= seq:
            raise InvalidData(f"{name}: has {len(tokens)} tokens; one sample of {seq} needs {seq + 1}")
        self.tokens = tokens
        self.seq = seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq
        window = torch.from_numpy(self.tokens[start : start + self.seq + 1].astype(np.int64))
        return window[:-1], window[1:]


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens for benchmarks; each sample depends on its index alone."""

    def __init__(self, num_samples: int, *, seq: int, vocab_size: int) -> None:
        self.num_samples = num_samples
        self.seq = seq
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        window = torch.randint(self.vocab_size, (self.seq + 1,), generator=generator)
        return window[:-1], window[1:]
