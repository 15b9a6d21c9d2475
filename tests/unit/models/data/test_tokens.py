import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import InvalidData
from shardwise.models.data.tokens import RandomTokens, TokenWindows, open_tokens, write_tokens

documents = st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=20), min_size=1, max_size=6)


@given(documents=documents, vocab_size=st.sampled_from([70_000, 100_000]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "text.v1"
    write_tokens(path, [(np.array(d), True) for d in documents], vocab_size=vocab_size, tokenizer="mine")
    for name in (path, f"{path}.bin", f"{path}.idx"):
        file = open_tokens(name)
        assert file.tokens.tolist() == [token for document in documents for token in document]
        assert np.diff(file.document_ends, prepend=0).tolist() == [len(document) for document in documents]
        assert (file.vocab_size, file.tokenizer) == (vocab_size, "mine")


def write(path: Path, count: int = 100, vocab_size: int = 256) -> Path:
    write_tokens(path, [(np.arange(count) % vocab_size, True)], vocab_size=vocab_size, tokenizer="bytes")
    return path


def test_small_vocabularies_take_two_bytes_a_token(tmp_path: Path) -> None:
    write(tmp_path / "small", vocab_size=65_536)
    write(tmp_path / "large", vocab_size=65_537)
    assert (tmp_path / "small.bin").stat().st_size == 200
    assert (tmp_path / "large.bin").stat().st_size == 400


def test_a_document_may_come_in_pieces(tmp_path: Path) -> None:
    pieces = [
        (np.array([1, 2]), False),
        (np.array([], dtype=np.int64), False),
        (np.array([3]), True),
        (np.array([4]), True),
    ]
    file = write_tokens(tmp_path / "t", pieces, vocab_size=10, tokenizer="mine")
    assert file.tokens.tolist() == [1, 2, 3, 4]
    assert file.document_ends.tolist() == [3, 4]


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path: Path, at: int, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] = byte
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: b.unlink(), r"t\.bin: cannot be read \(No such file"),
        (lambda b, i: i.unlink(), r"t\.idx: cannot be read \(No such file"),
        (lambda b, i: cut_in_half(b), r"t\.bin: has 100 bytes, its index says 100 tokens of 2 bytes"),
        (lambda b, i: b.write_bytes(b""), r"t\.bin: has 0 bytes"),
        (lambda b, i: i.write_bytes(b""), r"t\.idx: is not a complete token index"),
        (lambda b, i: cut_in_half(i), r"t\.idx: is not a complete token index"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:-3]), r"t\.idx: is not a complete token index"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:-8]), r"t\.idx: is not a complete token index"),
        (lambda b, i: spoil(i, 0, 0), r"t\.idx: is not a complete token index \(it does not start as one"),
        (lambda b, i: spoil(i, 9, 255), r"t\.idx: is not a complete token index"),
        (lambda b, i: spoil(i, 20, 255), r"t\.idx: is not a complete token index"),
        (lambda b, i: spoil(i, -8, 7), r"t\.idx: is not a complete token index .*do not add up"),
    ],
)
def test_a_damaged_pair_is_one_clear_line(tmp_path: Path, damage: object, message: str) -> None:
    write(tmp_path / "t")
    damage(tmp_path / "t.bin", tmp_path / "t.idx")  # type: ignore[operator]
    with pytest.raises(InvalidData, match=message) as caught:
        open_tokens(tmp_path / "t")
    assert len(str(caught.value).splitlines()) == 1


@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_any_damaged_byte_of_the_index_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = write(tmp_path_factory.mktemp("tokens") / "t")
    index = Path(f"{path}.idx")
    spoil(index, at % index.stat().st_size, byte)
    try:
        file = open_tokens(path)
    except InvalidData as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert len(file.tokens) == 100


def test_nothing_is_left_when_there_is_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="not one token"):
        write_tokens(tmp_path / "t", [], vocab_size=256, tokenizer="bytes")
    with pytest.raises(InvalidData, match="token 300 in a vocabulary of 256"):
        write_tokens(tmp_path / "t", [(np.array([1, 300]), True)], vocab_size=256, tokenizer="bytes")
    with pytest.raises(InvalidData, match="cannot be written"):
        write(tmp_path / "no" / "such" / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "t")

    def fails() -> object:
        yield np.array([1]), True
        raise InvalidData("the input broke")

    with pytest.raises(InvalidData, match="the input broke"):
        write_tokens(tmp_path / "t", fails(), vocab_size=256, tokenizer="bytes")  # type: ignore[arg-type]
    assert len(open_tokens(tmp_path / "t").tokens) == 100


@given(count=st.integers(2, 200), seq=st.integers(1, 30))
def test_windows_cover_the_text_and_targets_are_one_token_on(count: int, seq: int) -> None:
    tokens = np.arange(count)
    if count <= seq:
        with pytest.raises(InvalidData, match="needs"):
            TokenWindows(tokens, seq=seq)
        return
    windows = TokenWindows(tokens, seq=seq)
    inputs = torch.cat([windows[i][0] for i in range(len(windows))])
    targets = torch.cat([windows[i][1] for i in range(len(windows))])
    assert inputs.tolist() == list(range(len(windows) * seq))
    assert torch.equal(targets, inputs + 1)
    assert count - 1 - len(inputs) < seq
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_random_tokens_are_a_function_of_the_index() -> None:
    data = RandomTokens(10, seq=8, vocab_size=50)
    assert torch.equal(data[3][0], data[3][0])
    assert torch.equal(data[3][0][1:], data[3][1][:-1])
    assert not torch.equal(data[3][0], data[4][0])


@pytest.mark.timeout(20)
def test_an_index_that_is_no_file_or_holds_no_counts_is_one_line(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [(np.arange(9), True)], vocab_size=16, tokenizer="bytes")
    index = tmp_path / "t.idx"
    content = index.read_bytes()
    for number in (b"Infinity", b"1e99", b"true"):
        header = content[16:].partition(b"}")[0].replace(b'"vocab_size": 16', b'"vocab_size": ' + number) + b"}"
        ends = content[16:].partition(b"}")[2]
        index.write_bytes(content[:8] + len(header).to_bytes(8, "little") + header + ends)
        with pytest.raises(InvalidData, match=r"t\.idx: is not a complete token index .*(finite|whole number)"):
            open_tokens(tmp_path / "t")
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(InvalidData, match=r"t\.idx: cannot be read .is not a regular file"):
        open_tokens(tmp_path / "t")
