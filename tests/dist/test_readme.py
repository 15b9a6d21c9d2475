"""What the README says to type trains: the loop under "Use it in your own loop", on two ranks."""

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
        again = "for batch in loader" + snippet().split("for batch in loader")[1]
        exec(again, names)
    state = shardwise.full_state_dict(model)["model"]
    return losses, [first, list(seen)], [str(item.message) for item in caught], list(state.values())


def test_the_loop_of_the_readme_gives_each_rank_other_samples_and_each_epoch_another_order() -> None:
    assert len(snippet().splitlines()) <= 5
    (losses, epochs, warned, weights), (other_losses, other_epochs, _, other_weights) = run_ranks(loop, num_ranks=2)
    assert len(losses) == len(other_losses) == 2 * 7
    assert losses[-1] < losses[0]
    for own, others in zip(epochs, other_epochs, strict=True):
        assert len(set(own) | set(others)) == len(own) + len(others) == 100
    assert epochs[0] != epochs[1]
    assert not [line for line in warned if "same batch" in line]
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


def test_sections_of_the_readme_are_as_short_as_a_first_look() -> None:
    text = README.read_text()
    assert "pip install" in text.split("\n## ")[0]
    for title in ("In Transformers, Accelerate and Lightning", "Plan a job"):
        *_, block = re.findall(r"```\w*\n(.*?)```", text.split(f"## {title}")[1].split("\n## ")[0], flags=re.DOTALL)
        lines = [line for line in block.splitlines() if line and not line.startswith(("import ", "from "))]
        assert len(lines) <= 5, title
