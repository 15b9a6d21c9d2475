"""A few kills of benchmarks/kills.py, in the whole run; fifty are its own default. test_train_restart.py has a usual one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import processes_with
from whole import whole

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_kills", whole(1, 2))
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(num_kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", str(num_kills), "--ranks", "2", "--seed", "3"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^  killed ", done.stdout, re.MULTILINE)) == num_kills
    assert processes_with(f"TMPDIR={tmp_path}") == []
