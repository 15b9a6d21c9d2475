"""The step that is rehearsed before an auto run trains, on a GPU: its peak is as predicted, and it leaves no trace."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise.training.config.config import TrainConfig
from shardwise.training.rank_run import train

# A run writes its resolved config as TOML; an environment without this dependency of Shardwise says so here.
pytest.importorskip("tomli_w")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def run(folder: Path, *, probe: bool, budget: str = "40GiB", batch: int = 8) -> tuple[str, list[float]]:
    asked = TrainConfig.from_dict(
        {
            "task": {"model": "gpt2-124m", "dataset": "random", "seq": 256},
            "plan": {"strategy": "auto", "precision": "bf16", "micro_batch": batch, "capture": "off"},
            "auto": {"budget": budget, "probe": probe},
            "train": {"steps": 3, "log_every": 1, "eval_every": 0},
            "run": {"folder": str(folder), "device": "cuda", "tensorboard": False},
        }
    )
    console = Console(record=True, file=io.StringIO(), width=400)
    train(asked, console=console)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return console.export_text(), [json.loads(line)["loss"] for line in lines]


def test_a_rehearsed_step_is_within_its_prediction_and_changes_no_loss(tmp_path: Path) -> None:
    said, losses = run(tmp_path / "with", probe=True)
    print(said)
    assert said.count("Tried: ") == 1
    record = json.loads((tmp_path / "with" / "auto.json").read_text())
    # The update, which is not rehearsed, may be where the predicted peak is.
    assert 0.5 * record["predicted_bytes"] < record["measured_bytes"] < 1.03 * record["predicted_bytes"]
    without, expected = run(tmp_path / "without", probe=False)
    assert "Tried: " not in without
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_budget_is_a_limit_for_the_allocator_while_the_run_lasts(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(tmp_path, probe=True, budget="6GiB", batch=32)
    outside = json.loads((tmp_path / "auto.json").read_text())["outside_bytes"]
    assert 0 < torch.cuda.max_memory_reserved() <= 6 * 2**30 - outside
    # Beyond the budget, now that the run is over.
    assert torch.empty(7 * 2**30, dtype=torch.uint8, device="cuda").is_cuda
