"""`shardwise train` as one rank of a job."""

import os
from pathlib import Path

import pytest
import torch

from shardwise.doors.cli.app import main

NAME = "PYTORCH_ALLOC_CONF"
CONFIG = Path(__file__).parents[4] / "examples" / "demo.toml"


@pytest.mark.parametrize(("capture", "expected"), [("off", "expandable_segments:True"), ("auto", None)])
def test_segments_of_a_rank_expand_unless_graphs_have_pools(
    capture: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Set, so that they are restored.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), (NAME, ""), ("PYTORCH_CUDA_ALLOC_CONF", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(NAME)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    seen = []
    monkeypatch.setattr("shardwise.training.rank_run.train", lambda *_, **__: seen.append(os.environ.get(NAME)))
    with pytest.raises(SystemExit) as caught:
        main(["train", str(CONFIG), "--run", str(tmp_path), "--set", f"plan.capture={capture}"])
    assert not caught.value.code
    assert seen == [expected]
