import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import InvalidData, UnknownName
from shardwise.models.data import text
from shardwise.models.data.text import byte_encoding, encode_files, stdlib_tokens, tokenizer_encoding
from shardwise.models.data.tokens import write_tokens


def encode(*paths: Path, tmp_path: Path) -> list[list[int]]:
    encoding = byte_encoding()
    file = write_tokens(tmp_path / "out", encode_files(paths, encoding=encoding), vocab_size=256, tokenizer="bytes")
    return [part.tolist() for part in np.split(file.tokens, file.document_ends[:-1].astype(int))]


def test_a_file_is_a_document_of_bytes_that_ends_with_zero(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é\r\nb", newline="")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "b.txt").write_text("c")
    files = [tmp_path / name for name in ("a.txt", "empty.txt", "b.txt")]
    assert encode(*files, tmp_path=tmp_path) == [[*"é\r\nb".encode(), 0], [ord("c"), 0]]


def test_a_large_file_comes_in_pieces_and_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PIECE_CHARS", 10)
    (tmp_path / "a.txt").write_text("one line\n" * 20)
    pieces = list(encode_files([tmp_path / "a.txt"], encoding=byte_encoding()))
    assert len(pieces) > 5
    assert encode(tmp_path / "a.txt", tmp_path=tmp_path) == [[*(b"one line\n" * 20), 0]]


def test_json_lines_are_a_document_each(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "a\nb", "url": "x"}),
        "",
        json.dumps({"text": ""}),
        json.dumps({"text": "c"}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert encode(tmp_path / "a.jsonl", tmp_path=tmp_path) == [[*b"a\nb", 0], [*b"c", 0]]


@pytest.mark.parametrize("line", ["{", "[]", '{"body": "x"}', '{"text": 3}', "null"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(InvalidData, match=r"a\.jsonl, line 2: must be an object"):
        encode(tmp_path / "a.jsonl", tmp_path=tmp_path)


def test_what_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidData, match=r"a\.txt: is not text in UTF-8"):
        encode(tmp_path / "a.txt", tmp_path=tmp_path)
    with pytest.raises(InvalidData, match=r"none\.txt: cannot be read"):
        encode(tmp_path / "none.txt", tmp_path=tmp_path)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<stop>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_encodes_and_ends_documents(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.txt").write_text("a b a zebra")
    encoding = tokenizer_encoding(tokenizer_json)
    assert (encoding.vocab_size, encoding.end) == (5, 3)
    pieces = list(encode_files([tmp_path / "a.txt"], encoding=encoding))
    assert [(tokens.tolist(), ends) for tokens, ends in pieces] == [([0, 1, 0, 2], False), ([3], True)]
    assert tokenizer_encoding(tokenizer_json, end_token="<stop>").end == 4


def test_a_bad_tokenizer_is_one_line(tmp_path: Path, tokenizer_json: Path) -> None:
    with pytest.raises(UnknownName, match="unknown token '<eos>'"):
        tokenizer_encoding(tokenizer_json, end_token="<eos>")
    with pytest.raises(InvalidData, match="no such"):
        tokenizer_encoding(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InvalidData, match="is not a tokenizer"):
        tokenizer_encoding(tmp_path / "bad.json")


def test_the_standard_library_is_text_of_this_python() -> None:
    tokens = stdlib_tokens(max_bytes=200_000)
    assert len(tokens) == 200_000
    assert b"import" in tokens.tobytes()
    assert tokens.tobytes() == stdlib_tokens(max_bytes=300_000).tobytes()[:200_000]


def test_a_python_without_sources_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InvalidData, match="has no source files"):
        stdlib_tokens()


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(InvalidData, match=r'a\.jsonl, line 2: must be an object with a string "text"'):
        list(encode_files([path], encoding=byte_encoding()))
