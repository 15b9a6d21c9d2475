"""A rank's snapshot: what is stored, how damage is seen, and how reads are planned over pieces of any cut."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import CheckpointError
from shardwise.state.checkpoint.contents import StatePiece
from shardwise.state.checkpoint.manifest import Contents
from shardwise.state.recovery.finding import HeldRecord
from shardwise.state.recovery.generation import (
    COPY,
    OWN,
    DataFile,
    NoRoom,
    Record,
    RecordName,
    StoredPiece,
    check_totals,
    data_name,
    elements_of,
    laid_out,
    mapped,
    read_record,
    size_of,
    start_of_file,
    with_total,
)
from shardwise.state.recovery.restoring import planned

NAME = RecordName(step=12, start="ab12", rank=3, num_ranks=8, kind=OWN)


def stored(folder: Path) -> Record:
    """A record of pieces of several dtypes, of sizes that fit no alignment."""
    tensors = [torch.randn(7), torch.randn(3).bfloat16(), torch.arange(5), torch.ones(1, dtype=torch.uint8)]
    given = [StatePiece(name=f"x{i}", shape=(9,), start=1, elements=tensor) for i, tensor in enumerate(tensors)]
    pieces = laid_out(given)
    file = DataFile(folder / data_name(start="ab12", slot=0, rank=3, kind=OWN), num_bytes=size_of(pieces))
    for piece, tensor in zip(pieces, tensors, strict=True):
        elements_of(piece, memory=file.memory).copy_(tensor)
    totals = tuple(with_total(piece, memory=file.memory) for piece in pieces)
    record = Record(name=NAME, data=file.path.name, contents=Contents(step=12), pieces=totals)
    (folder / str(NAME)).write_text(record.to_text())
    for piece, tensor in zip(pieces, tensors, strict=True):
        assert torch.equal(elements_of(piece, memory=mapped(folder, record)), tensor)
    return record


def test_names_say_which_generation_a_file_is_of() -> None:
    assert RecordName.parse(str(NAME)) == NAME
    assert RecordName.parse(str(replace(NAME, kind=COPY))) == replace(NAME, kind=COPY)
    assert start_of_file(str(NAME)) == start_of_file(data_name(start="ab12", slot=1, rank=0, kind=COPY)) == "ab12"
    for other in ("owner.json", "node", "rank-00000.lock", "a.b.c.d.own.json", ".ab12.json-77"):
        assert RecordName.parse(other) is None
        assert start_of_file(other) in ("", "a")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = stored(tmp_path)
    assert read_record(tmp_path, NAME) == record
    check_totals(record, memory=mapped(tmp_path, record))


def test_every_changed_byte_of_the_data_is_seen(tmp_path: Path) -> None:
    record = stored(tmp_path)
    path = tmp_path / record.data
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=r"rank 3, step 12, is damaged: x\d does not have its checksum"):
            check_totals(record, memory=mapped(tmp_path, record))


def test_a_record_or_data_that_are_cut_short_are_seen(tmp_path: Path) -> None:
    record = stored(tmp_path)
    (tmp_path / record.data).write_bytes(bytes(63))
    with pytest.raises(CheckpointError, match="is damaged: its data file"):
        mapped(tmp_path, record)
    text = (tmp_path / str(NAME)).read_text()
    for wrong in (text[:-9], text.replace("x1", "x9"), "", "5"):
        (tmp_path / str(NAME)).write_text(wrong)
        with pytest.raises(CheckpointError, match="is damaged: its record"):
            read_record(tmp_path, NAME)


def test_without_room_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(NoRoom):
        DataFile(tmp_path / "large", num_bytes=2**60)
    assert list(tmp_path.iterdir()) == []


@given(
    cuts=st.lists(st.integers(0, 40), max_size=6),
    other=st.lists(st.integers(0, 40), max_size=6),
    wanted=st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted),
    here=st.sets(st.integers(0, 6)),
)
def test_reads_cover_what_is_wanted_once_from_whatever_cut(
    cuts: list[int], other: list[int], wanted: list[int], here: set[int]
) -> None:
    """Node b holds all; node a holds some pieces of another cut, and these are preferred there."""

    def held(bounds: list[int], node: str, ranks: set[int] | None = None) -> list[HeldRecord]:
        edges = sorted({0, 40, *bounds})
        return [
            HeldRecord(
                record=Record(
                    name=replace(NAME, rank=rank),
                    data="",
                    contents=Contents(step=12),
                    pieces=(
                        StoredPiece(name="x", dtype=torch.int64, shape=(40,), start=start, count=stop - start, begin=0),
                    ),
                ),
                node=node,
            )
            for rank, (start, stop) in enumerate(pairwise(edges))
            if ranks is None or rank in ranks
        ]

    near, far = held(other, "a", here), held(cuts, "b")
    reads = planned({"x": (wanted[0], wanted[1])}, [*near, *far], node="a")
    read = [index for one in reads for index in range(one.start, one.stop)]
    assert read == list(range(*wanted))
    mine = {index for one in near for index in range(one.record.pieces[0].start, 40)
            if index < one.record.pieces[0].start + one.record.pieces[0].count}  # fmt: skip
    for one in reads:
        piece = (near + far)[one.record].record.pieces[one.piece]
        assert piece.start <= one.start <= one.stop <= piece.start + piece.count
        if one.record >= len(near):
            assert not mine & set(range(one.start, one.stop))
