"""A few kills of benchmarks/kills.py; fifty are its own default."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import processes_with

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "2", "--ranks", "2", "--seed", "3"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^  killed ", done.stdout, re.MULTILINE)) == 2
    assert processes_with(f"TMPDIR={tmp_path}") == []
