"""Ranks on NCCL outlive a full GPU, wherever in forward or backward it is full; two ranks share one GPU for this."""

import json
from pathlib import Path
from typing import Any

import pytest
from sharing_ranks import run_script

NUM_RANKS = 2


def found_by_ranks(folder: Path, *, device: str) -> list[dict[str, Any]]:
    run_script("survive_rank.py", num_ranks=NUM_RANKS, folder=folder, device=device, timeout_s=150)
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
