"""Units as CUDA graphs in loops of all kinds: the bits of the same loop without them, on one rank and on two."""

import json
from pathlib import Path

import pytest
import torch
from sharing_ranks import run_script
from test_unit_graphs import REPLAYED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_loops_with_unit_graphs_have_the_bits_of_the_same_loops_without(tmp_path: Path, num_ranks: int) -> None:
    run_script("unit_graphs_rank.py", num_ranks=num_ranks, folder=tmp_path, timeout_s=390)
    for rank in range(num_ranks):
        for case, (said, num_calls, num_replayed) in json.loads((tmp_path / f"found{rank}.json").read_text()).items():
            assert not said, (case, said)
            assert num_replayed > REPLAYED * num_calls, (case, num_calls, num_replayed)
