"""The core trains alone: where nothing else of the engine can be imported, it gives the bits of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from whole import whole

from shardwise.plan.placement import STRATEGIES

HERE = Path(__file__).parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("amount", ["usual", *whole("all")])
def test_the_core_alone_is_bit_equal_to_one_process(amount: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "core_alone.py"), str(rank), "2", str(tmp_path / "store"), amount],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=110) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in said)
    # Of each strategy two meshes with and without accumulation, or one of them with; and bf16.
    num_equal = 5 * len(STRATEGIES) if amount == "all" else 2 * len(STRATEGIES) + 2
    assert [out.count("equal: ") for out, _ in said] == [num_equal] * 2
