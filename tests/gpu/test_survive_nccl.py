"""Ranks on NCCL outlive a full GPU, wherever in forward or backward it is full; two ranks share one GPU for this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_RANKS = 2


def found_by_ranks(folder: Path, *, device: str) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "dist"), str(here.parent), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / "survive_rank.py"), str(rank), str(NUM_RANKS), str(folder), device],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.whole)]
)
def test_ten_steps_that_ran_out_of_memory_are_those_of_a_run_that_never_did(device: str, tmp_path: Path) -> None:
    found = found_by_ranks(tmp_path, device=device)
    assert sum(case["failed"] for case in found[0].values()) >= 10
    for name, case in found[0].items():
        assert case["survived"] == case["failed"], name
    for rank, cases in enumerate(found):
        # Losses of each step, weights, optimizer state, loss scale and random states: no sample was lost or repeated.
        assert {name: case["differences"] for name, case in cases.items() if case["differences"]} == {}, rank
