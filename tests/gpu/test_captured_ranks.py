"""Several ranks capture together: every strategy gives the bits of ordinary steps, and the job ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu_capture_what_they_would_compute(tmp_path: Path, num_ranks: int) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / "capture_rank.py"), str(rank), str(num_ranks), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), outputs
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
