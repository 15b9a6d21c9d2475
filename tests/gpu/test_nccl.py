"""On NCCL every strategy gives the losses that it gives on Gloo; several ranks share one GPU for this."""

import json
from pathlib import Path

import pytest
from sharing_ranks import run_script

from shardwise.plan.placement import STRATEGIES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def losses(folder: Path, *, num_ranks: int, device: str) -> dict[str, list[float]]:
    run_script("nccl_rank.py", num_ranks=num_ranks, folder=folder, device=device)
    return json.loads((folder / f"losses-{device}-{num_ranks}.json").read_text())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nccl_gives_what_gloo_gives(tmp_path: Path, num_ranks: int) -> None:
    nccl = losses(tmp_path, num_ranks=num_ranks, device="cuda")
    gloo = losses(tmp_path, num_ranks=num_ranks, device="cpu")
    assert nccl.pop("overflow") == gloo.pop("overflow") == [2.0**10, 2.0**9, 2.0**9, 2.0]
    for strategy in STRATEGIES:
        norm_ratio, difference_of_statistics = nccl.pop(f"batch norm {strategy}")
        assert norm_ratio == pytest.approx(1.0, rel=1e-4)
        assert difference_of_statistics < 1e-5
    for name, expected in gloo.items():
        # fp32 differs by the order of sums in matrix products; bf16 has 8 bits.
        tolerance = 1e-4 if name.endswith("fp32") else 2e-2
        assert nccl[name] == pytest.approx(expected, rel=tolerance), name
    for precision in ("fp32", "bf16"):
        reference = nccl[f"ddp {precision}"]
        for name, found in nccl.items():
            if name.endswith(precision):
                assert found == pytest.approx(reference, rel=1e-4 if precision == "fp32" else 5e-3), name
