"""Text files → documents of tokens, by bytes or by a `tokenizer.json`.

Each document ends with one token that does not occur in text: byte 0, or the tokenizer's end token.
"""

import codecs
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.base.errors import InvalidData, MissingExtra, UnknownName
from shardwise.base.files.data_file import UnreadableFile, open_to_read, parse_json
from shardwise.models.data.tokens import TokenPiece

# Larger files are encoded in pieces, cut at line ends, so that memory stays bounded.
_PIECE_CHARS = 2**20
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Maps text to token numbers below `vocab_size`; `end` is the token that ends a document."""

    name: str
    vocab_size: int
    end: int
    encode: Callable[[str], NDArray[Any]]


def byte_encoding() -> Encoding:
    """Return the encoding with one token per byte of UTF-8."""
    return Encoding(
        name="bytes", vocab_size=256, end=0, encode=lambda text: np.frombuffer(text.encode(), dtype=np.uint8)
    )


def tokenizer_encoding(path: Path, *, end_token: str | None = None) -> Encoding:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra.of("tokenizers", needed_for="--tokenizer", extra="hf") from None
    if not path.is_file():
        raise InvalidData(f"{path}: there is no such tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise InvalidData(f"{path}: is not a tokenizer.json ({error})") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if end_token is None:
        end_token = next((token for token in _END_TOKENS if token in vocabulary), None)
    if end_token is None:
        raise InvalidData(f"{path}: which token ends a document? Say --end-token, a token of its vocabulary")
    if end_token not in vocabulary:
        raise UnknownName.of("token", end_token, known=vocabulary)

    def encode(text: str) -> NDArray[Any]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    # Added tokens may have numbers beyond the vocabulary's own size, with gaps between.
    return Encoding(name=path.name, vocab_size=max(vocabulary.values()) + 1, end=vocabulary[end_token], encode=encode)


def encode_files(paths: Iterable[Path], *, encoding: Encoding) -> Iterator[TokenPiece]:
    """Yield the documents of text files (one per file) and of `.jsonl` files (one per line, in the field "text")."""
    end = np.array([encoding.end], dtype=np.uint32)
    for path in paths:
        documents = _json_lines(path) if path.suffix == ".jsonl" else iter([_pieces(path)])
        for document in documents:
            empty = True
            for piece in document:
                tokens = encoding.encode(piece)
                empty = empty and not tokens.size
                yield tokens, False
            if not empty:
                yield end, True


def _pieces(path: Path) -> Iterator[str]:
    try:
        with open(open_to_read(path), encoding="utf-8", errors="strict", newline="") as file:
            while lines := file.readlines(_PIECE_CHARS):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path}: is not text in UTF-8 ({error.reason})") from error
    except OSError as error:
        raise InvalidData(f"{path}: cannot be read ({error.strerror})") from error


def _json_lines(path: Path) -> Iterator[Iterable[str]]:
    number = 0
    for piece in _pieces(path):
        for line in piece.splitlines():
            number += 1
            if not line.strip():
                continue
            try:
                text = parse_json(line, finite=False)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (KeyError, TypeError, UnreadableFile) as error:
                raise InvalidData(f'{path}, line {number}: must be an object with a string "text"') from error
            yield [text]


def _sources(folder: Path, *, without: Collection[str]) -> Iterator[Path]:
    """Yield the Python files below a folder; the folders named in `without` are not entered, they may be large."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in without]
        yield from (Path(place, name) for name in names if name.endswith(".py"))


def stdlib_tokens(*, max_bytes: int = 8 * 2**20) -> NDArray[np.uint8]:
    """Return byte tokens of the Python standard library's source files: real text that every machine has.

    The files are read in the order of their names, up to `max_bytes`; tests are left out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(folder, without={"site-packages", "dist-packages", "test", "tests", "idlelib"}))
    documents: list[NDArray[np.uint8]] = []
    num_bytes = 0
    for path in files:
        if num_bytes >= max_bytes:
            break
        # A few files of the library declare another encoding than UTF-8, so they are read as bytes.
        source = path.read_bytes().removeprefix(codecs.BOM_UTF8).replace(b"\0", b"")
        documents.append(np.frombuffer(source + b"\0", dtype=np.uint8))
        num_bytes += len(source) + 1
    if not documents:
        raise InvalidData(f"{folder}: this Python has no source files of its library; use tokens:PATH instead")
    return np.concatenate(documents)[:max_bytes]
