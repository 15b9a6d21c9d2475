"""What the planner predicts for the trainings of captured_models.py: `python benchmarks/captured_predictions.py`.

A line for each training whose memory was measured (benchmarks/results/captured_models_h200.json): allocated and
reserved bytes, predicted against measured. Runs without a GPU.
"""

import argparse
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from captured_models import CONFIGS, MODELS
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate
from shardwise.sources import Source
from shardwise.spec import ModelSpec
from shardwise.tasks import Task

RESULTS = Path(__file__).parent / "results" / "captured_models_h200.json"


def task(name: str) -> Task:
    """A model on the meta device, trained as captured_models.py does."""
    kind, _, seq, config = MODELS[name]
    made = getattr(transformers, CONFIGS[kind])(**config)
    with torch.device("meta"):
        model = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa").float().train()

    def make_batch(size: int) -> dict[str, Tensor]:
        ids = torch.zeros(size, seq, dtype=torch.int64)
        return {"ids": ids, "mask": torch.ones_like(ids)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(input_ids=batch["ids"], labels=batch["ids"]).loss
        return found

    return Task(model=model, loss=loss, make_batch=make_batch)


# For `python:` below.
qwen, gemma, bert, llama = (partial(task, name) for name in MODELS)
_FUNCTIONS = dict(zip(MODELS, ("qwen", "gemma", "bert", "llama"), strict=True))


@cache
def spec_of(name: str) -> ModelSpec:
    return Source(f"python:{__file__}:{_FUNCTIONS[name]}").spec_for(Plan(precision="bf16"))


def predict(name: str, *, capture: str) -> MemoryEstimate:
    plan = Plan(precision="bf16", capture=capture)
    # captured_models.py makes its models on the GPU.
    return estimate(spec_of(name), plan=plan, num_ranks=1, batch=MODELS[name][1], made_on_device=True)


def compare(row: dict[str, Any]) -> dict[str, float]:
    """Predicted / measured - 1, by total."""
    # Whether `auto` captures is not known before; here it did.
    predicted = predict(row["model"], capture="off" if row["capture"] == "off" else "on")
    return {
        total: getattr(predicted, f"{total}_bytes") / row[f"{total}_bytes"] - 1 for total in ("allocated", "reserved")
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measured", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for row in json.loads(arguments.measured.read_text())["rows"]:
        errors = "  ".join(f"{total} {100 * error:+.2f}%" for total, error in compare(row).items())
        measured = "  ".join(f"{row[f'{total}_bytes'] / 2**20:.0f}" for total in ("allocated", "reserved"))
        print(f"{row['model']:12} {'eager' if row['capture'] == 'off' else 'captured':9} {measured} MiB  {errors}")


if __name__ == "__main__":
    main()
