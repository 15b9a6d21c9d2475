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


def rows_of(group: str, strategies: tuple[str, ...]) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, str(COMMAND), "--only", group, "--json", "--limit", "170", "--strategies", *strategies],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=350)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, stderr
    rows: dict[str, Any] = json.loads(stdout)[group]["rows"]
    for row in rows.values():
        assert set(row["distance"]) == set(strategies)
        assert all(distance <= row["bound"] for distance in row["distance"].values())
    return rows


STRATEGIES = [pytest.param(("fsdp",)), pytest.param(("ddp", "zero2"), marks=pytest.mark.whole)]


@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_transformers_trainer_and_an_accelerate_loop_train_as_under_their_own_ddp(strategies: tuple[str, ...]) -> None:
    needs("transformers")
    needs("accelerate")
    rows = rows_of("hf", strategies)
    assert len(rows) == 6
    assert len([name for name, row in rows.items() if row["bound"] == 0]) == 3


@pytest.mark.whole
@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_lightnings_trainer_and_fabric_train_as_under_their_own_ddp(strategies: tuple[str, ...]) -> None:
    needs("lightning")
    assert len(rows_of("lightning", strategies)) == 3


@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_trls_trainers_train_as_under_their_own_ddp_whole_and_with_lora(strategies: tuple[str, ...]) -> None:
    needs("trl")
    needs("peft")
    assert len(rows_of("trl", strategies)) == 4


@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_a_loop_in_ray_trains_as_under_rays_own_ddp(strategies: tuple[str, ...]) -> None:
    needs("ray")
    assert len(rows_of("ray", strategies)) == 1
