"""Our safetensors files and those of the safetensors package are the same thing."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.base.errors import CheckpointError
from shardwise.state.checkpoint.tensor_file import DTYPES, TensorEntry, opened, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    by_dtype = {name: torch.arange(6).view(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return by_dtype | {
        "ü.scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "odd": torch.arange(3, dtype=torch.int8),
    }


def write(path: Path, values: dict[str, torch.Tensor]) -> None:
    entries = {name: TensorEntry(dtype=value.dtype, shape=tuple(value.shape)) for name, value in values.items()}
    sink = io.BytesIO()
    write_tensors(sink, entries, iter(values.values()), metadata={"format": "pt"})
    path.write_bytes(sink.getvalue())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(-1), other.view(-1))


def test_the_safetensors_package_reads_ours(tmp_path: Path) -> None:
    expected = {name: value for name, value in tensors().items() if name != "C64"}
    write(tmp_path / "ours.safetensors", expected)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == expected.keys()
    assert all(same(found[name], value) for name, value in expected.items())


def test_we_read_theirs(tmp_path: Path) -> None:
    expected = {name: value for name, value in tensors().items() if name != "C64"}
    save_file(expected, tmp_path / "theirs.safetensors")
    with opened(tmp_path / "theirs.safetensors") as file:
        assert file.entries.keys() == expected.keys()
        assert all(same(file.read(name), value) for name, value in expected.items())


def test_any_box_is_read_into_any_memory(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    with opened(tmp_path / "x.safetensors") as file:
        for target in (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3).double(), torch.zeros(3, 2, 1).permute(2, 1, 0)):
            file.fill(target, "x", offsets=(1, 1, 0))
            assert torch.equal(target.float(), whole[1:, 1:, :3])
        rows = torch.zeros(3, 3, 4)
        file.fill(rows[1:2], "x", offsets=(1, 0, 0))
        assert torch.equal(rows, torch.stack([torch.zeros(3, 4), whole[1], torch.zeros(3, 4)]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",
        (2**62).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"[1]\n",
        (2).to_bytes(8, "little") + b"\xff\xff",
        *(
            len(text := json.dumps({"x": item}).encode()).to_bytes(8, "little") + text + b"\0" * 8
            for item in (
                {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
                {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
                {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
                {"dtype": "X", "shape": [2], "data_offsets": [0, 8]},
                {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
                3,
            )
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(CheckpointError, match="bad: ") as caught, opened(tmp_path / "bad"):
        pass
    assert len(str(caught.value).splitlines()) == 1
