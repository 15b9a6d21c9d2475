"""Ranks that share one GPU: a script of this folder, started once for each."""

import os
import subprocess
import sys
from pathlib import Path


def run_script(name: str, *, num_ranks: int, folder: Path, device: str = "cuda", timeout_s: float = 250) -> None:
    """`name RANK NUM_RANKS FOLDER DEVICE` on every rank; all must end well."""
    here = Path(__file__).parent
    paths = (str(here), str(here.parent / "dist"), str(here.parent), os.environ.get("PYTHONPATH"))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / name), str(rank), str(num_ranks), str(folder), device],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
