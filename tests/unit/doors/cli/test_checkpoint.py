"""`shardwise checkpoint`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.doors.cli.app import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    for step in (10, 20):
        checkpoints.save(model, optimizer, step=step, progress={"loss": 1.5})
    return tmp_path / "run"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


def test_inspect_shows_the_newest_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", folder, "--tensors")
    assert code == 0
    assert str(folder / "step-00000020") in out
    assert "8 in 2 tensors" in out
    assert "AdamW" in out
    assert "optimizer.exp_avg.weight  2 × 3  float32" in out


def test_inspect_as_json_is_the_manifest_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", folder / "step-00000010", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["contents"]["progress"] == {"loss": 1.5}


def test_verify_names_the_damaged_one_and_ends_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", folder)[0] == 0
    (folder / "step-00000020" / "rank-00000.safetensors").unlink()
    code, out, err = run(capsys, "verify", folder)
    assert code == 2
    assert [row.split()[:2] for row in out.splitlines()] == [["step-00000010", "good"], ["step-00000020", "damaged"]]
    assert err == "CheckpointError: 1 of 2 damaged: step-00000020\n"


def test_export_and_import_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "weights.safetensors"
    assert run(capsys, "export", folder, "--out", out)[0] == 0
    assert load_file(out)["weight"].shape == (2, 3)
    code, _, err = run(capsys, "export", folder, "--out", out)
    assert code == 2
    assert err == f"InvalidData: {out} exists; --force replaces it\n"
    assert run(capsys, "export", folder, "--out", out, "--force", "--precision", "bf16")[0] == 0
    assert load_file(out)["weight"].dtype == torch.bfloat16
    code, said, _ = run(capsys, "import", out, "--out", tmp_path / "new")
    assert code == 0
    assert "step-00000000: 2 tensors" in said
    assert "weights only" in run(capsys, "inspect", tmp_path / "new")[1]


def test_a_folder_without_checkpoints_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "inspect", tmp_path)
    assert code == 2
    assert err == f"InvalidData: {tmp_path}: neither a checkpoint nor a run, and holds no checkpoints\n"


def test_names_in_a_checkpoint_reach_the_terminal_without_escape_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Module()
    model.register_parameter("a\x1b[31m\nb", nn.Parameter(torch.ones(1)))
    Checkpoints(tmp_path, asynchronous=False).save(model, step=1, progress={"p\x1b[2J": 1})
    _, out, _ = run(capsys, "inspect", tmp_path, "--tensors")
    assert "model.a?[31m?b" in out
    assert "p?[2J" in out
    assert "\x1b" not in out
    code, _, err = run(capsys, "inspect", f"{tmp_path}/\x1b[31m")
    assert code == 2
    assert "\x1b" not in err


def test_doctor_shows_a_checkpoint_without_escape_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\x1b[31m"
    Checkpoints(folder, asynchronous=False).save(nn.Linear(2, 2), step=1)
    with pytest.raises(SystemExit):
        main(["doctor", str(folder)])
    out = capsys.readouterr().out
    assert "a?[31m: 1 checkpoints, the newest of step 1" in out
    assert "\x1b" not in out
