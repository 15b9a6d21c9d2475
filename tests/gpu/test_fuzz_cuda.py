"""Random compositions (tests/fuzz) on a GPU, with units as CUDA graphs, are equal to plain torch or refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from sharing_ranks import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("num_ranks", "num_seeds"),
    [
        (1, 60),
        (2, 32),
        pytest.param(1, 420, marks=pytest.mark.whole),
        pytest.param(2, 60, marks=pytest.mark.whole),
    ],
)
def test_random_compositions_with_graphs_are_right_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_seeds: int
) -> None:
    monkeypatch.setenv("FUZZ_SEEDS", f"0:{num_seeds}")
    run_script("fuzz_rank.py", num_ranks=num_ranks, folder=tmp_path, timeout_s=500)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == {}
    assert found["replayed"] > num_seeds
