"""What the README says to type trains: the loop under "Use it in your own loop", on two ranks."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shardwise

README = Path(__file__).parents[2] / "README.md"


def snippet() -> str:
    """What the README adds to a script that has a model, an optimizer, a dataset and a loss: here, those of this test.

    test_documents.py runs all of it.
    """
    section = README.read_text().split("## Use it in your own loop")[1]
    (found,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], flags=re.DOTALL)
    return "model, optimizer = shardwise.prepare" + str(found).split("model, optimizer = shardwise.prepare")[1]


def loop(rank: int) -> tuple[list[float], list[list[int]], list[str], list[Tensor]]:
    """Losses, the samples of each of two epochs, what was warned of, and the weights."""
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    losses: list[float] = []
    seen: list[int] = []

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        seen.extend(int(sample) for sample in batch)
        loss: Tensor = (model(batch.float()[:, None]) - 1).square().mean()
        losses.append(loss.item())
        return loss

    names: dict[str, Any] = {
        "shardwise": shardwise,
        "torch": torch,
        "DataLoader": DataLoader,
        "model": model,
        "optimizer": optimizer,
        "dataset": list(range(101)),
        "loss_of": loss_of,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(snippet(), names)
        first, seen[:] = list(seen), []
        again = "for number, batch in" + snippet().split("for number, batch in")[1]
        exec(again, names)
    state = shardwise.full_state_dict(model)["model"]
    return losses, [first, list(seen)], [str(item.message) for item in caught], list(state.values())


def test_the_loop_of_the_readme_gives_each_rank_other_samples_and_each_epoch_another_order() -> None:
    assert len(snippet().splitlines()) <= 8
    (losses, epochs, warned, weights), (other_losses, other_epochs, _, other_weights) = run_ranks(loop, num_ranks=2)
    assert len(losses) == len(other_losses) == 2 * 7
    assert losses[-1] < losses[0]
    for own, others in zip(epochs, other_epochs, strict=True):
        assert len(set(own) | set(others)) == len(own) + len(others) == 100
    assert epochs[0] != epochs[1]
    assert not [line for line in warned if "same batch" in line]
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


def test_the_readme_is_two_screens_and_says_how_to_install_on_the_first() -> None:
    text = README.read_text()
    assert "pip install" in text.split("\n## ")[0]
    assert len(text.splitlines()) <= 130


def test_the_numbers_of_the_first_table_are_in_the_results() -> None:
    table = [line for line in README.read_text().splitlines() if line.startswith("| **")]
    assert len(table) == 5
    loop, memory, wrong, plan, dial = table
    (row,) = [row for row in results("unit_graphs_h200")["rows"] if row["case"] == "qwen3-0.6b, 4 lengths"]
    for engine in ("units", "torch_ddp"):
        assert f"{row['step_seconds'][engine] * 1e3:.1f} ms" in loop
    cases = {(case["engine"], case["strategy"]): case for case in results("bench_vit_large_h200")["cases"]}
    for engine in ("shardwise", "torch"):
        assert f"{cases[engine, 'ddp']['allocated_bytes'][0] / 2**30:.1f} GiB" in memory
    scenarios = (README.parent / "docs" / "scenarios.md").read_text()
    counts = {
        line.split("|")[1].strip(" `"): line.split("|")[-2].strip()
        for line in scenarios.split("| Optimizers |")[0].splitlines()
        if "|" in line
    }
    (total, *_) = [name.removeprefix("of ") for name in counts if name.startswith("of ")]
    assert f"{total} training scripts on 2 ranks" in wrong
    assert f"has {total} scripts" in (README.parent / "docs" / "coming-from.md").read_text()
    ours = ("ddp", "zero1", "zero2", "fsdp")
    assert [counts[name] for name in ours] == ["0"] * 4
    # All of them once more, if the page has that.
    with_graphs = {counts.get(f"{name}, graphs") for name in ours}
    assert with_graphs == ({"0"} if "with layers as graphs" in wrong else {None})
    assert f"DDP {counts['torch DDP']}, FSDP2 (`fully_shard`) {counts['fully_shard']}" in wrong
    assert "median error 0.03%, largest 1.6%" in plan
    assert results("bench_gpt2_124m_h200")["equivalence"]["differences"] == []
    ran = [case for case in results("bench_gpt2_124m_h200")["cases"] if case["allocated_bytes"]]
    assert f"all {len(ran)} runs train alike" in dial


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((README.parent / "benchmarks" / "results" / f"{name}.json").read_text())
    return found
