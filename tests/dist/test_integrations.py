"""Shardwise inside other frameworks' loops: every row of `python benchmarks/integrations.py` holds."""

import json
import os
import runpy
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import run_ranks

COMMAND = Path(__file__).parents[2] / "benchmarks" / "integrations.py"
ROWS = COMMAND.with_name("integration_rows")


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
    check(rows, strategies)
    return rows


def check(rows: dict[str, Any], strategies: tuple[str, ...]) -> None:
    for row in rows.values():
        assert set(row["distance"]) == set(strategies)
        assert all(distance <= row["bound"] for distance in row["distance"].values())


def run_script(rank: int, script: str, num_ranks: int, folder: str, strategies: tuple[str, ...]) -> None:
    """A script of rows on a rank of the pool, as torchrun would have started it."""
    from accelerate.state import AcceleratorState, GradientState

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables = {"HF_HUB_OFFLINE": "1", **{name: str(number) for name, number in place.items()}}
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "argv", [script, folder, *strategies]),
        patch.object(sys, "path", [str(ROWS), *sys.path]),
    ):
        try:
            runpy.run_path(str(ROWS / script), run_name="__main__")
        finally:
            # Accelerate's own, of the whole process: a test after this one begins without them.
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


STRATEGIES = [pytest.param(("fsdp",)), pytest.param(("ddp", "zero2"), marks=pytest.mark.whole)]


def check_hf(rows: dict[str, Any]) -> None:
    exact = [name for name, row in rows.items() if row["bound"] == 0]
    assert (len(rows), len(exact)) == (8, 5)


@pytest.mark.timeout(180)
def test_transformers_trainer_and_an_accelerate_loop_train_under_fsdp_as_under_their_own_ddp(tmp_path: Path) -> None:
    needs("transformers")
    needs("accelerate")
    rows: dict[str, Any] = {}
    for num_ranks in (2, 1):
        args = ("hf_rows.py", num_ranks, str(tmp_path), ("fsdp",))
        run_ranks(run_script, num_ranks=num_ranks, args=args, timeout_seconds=150.0)
        rows |= json.loads((tmp_path / "found.json").read_text())
    check(rows, ("fsdp",))
    check_hf(rows)


@pytest.mark.whole
@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_transformers_trainer_and_an_accelerate_loop_train_as_under_their_own_ddp(strategies: tuple[str, ...]) -> None:
    needs("transformers")
    needs("accelerate")
    check_hf(rows_of("hf", strategies))


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
    assert len(rows_of("trl", strategies)) == 6


@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategies", STRATEGIES)
def test_a_loop_in_ray_trains_as_under_rays_own_ddp(strategies: tuple[str, ...]) -> None:
    needs("ray")
    assert len(rows_of("ray", strategies)) == 1
