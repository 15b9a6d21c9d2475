"""Several ranks capture together: every strategy gives the bits of ordinary steps, and the job ends."""

import json
from pathlib import Path

import pytest
import torch
from sharing_ranks import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu_capture_what_they_would_compute(tmp_path: Path, num_ranks: int) -> None:
    run_script("capture_rank.py", num_ranks=num_ranks, folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
