"""Shardwise inside other frameworks' loops: every row of `python benchmarks/integrations.py` holds."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(__file__).parents[2] / "benchmarks" / "integrations.py"


def needs(package: str) -> None:
    """Skip where it is not installed. It is not imported here: some set environment variables."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")


def rows_of(group: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, str(COMMAND), "--only", group, "--json", "--limit", "170"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=220)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, stderr
    rows: dict[str, Any] = json.loads(stdout)[group]["rows"]
    for row in rows.values():
        assert set(row["distance"]) == {"ddp", "zero2", "fsdp"}
        assert all(distance <= row["bound"] for distance in row["distance"].values())
    return rows


@pytest.mark.timeout(240)
def test_transformers_trainer_and_an_accelerate_loop_train_as_under_their_own_ddp() -> None:
    needs("transformers")
    needs("accelerate")
    rows = rows_of("hf")
    assert len(rows) == 6
    exact = [name for name, row in rows.items() if row["bound"] == 0]
    assert len(exact) == 3


@pytest.mark.timeout(240)
def test_lightnings_trainer_and_fabric_train_as_under_their_own_ddp() -> None:
    needs("lightning")
    assert len(rows_of("lightning")) == 3


@pytest.mark.timeout(240)
def test_trls_trainers_train_as_under_their_own_ddp_whole_and_with_lora() -> None:
    needs("trl")
    needs("peft")
    assert len(rows_of("trl")) == 4


@pytest.mark.timeout(240)
def test_a_loop_in_ray_trains_as_under_rays_own_ddp() -> None:
    needs("ray")
    assert len(rows_of("ray")) == 1
