"""A stream of `datasets` whose position is saved with the model: a resumed training reads on where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint import Checkpoints

pytest.importorskip("datasets")

# The last of three steps is rank 0's alone.
NUM_SAMPLES, BATCH = 17, 4


def train(rank: int, strategy: str, folder: str, saved_after: int) -> list[tuple[list[list[int]], dict[str, Tensor]]]:
    """(samples of each step, weights at the end) of a run that was not interrupted, and of one that was resumed."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    def run(*, save: bool = False, resume: bool = False) -> tuple[list[list[int]], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        shardwise.prepare(model, optimizer, strategy)
        stream: Any = datasets.load_dataset("json", data_files=f"{folder}/x.jsonl", split="train", streaming=True)
        stream = split_dataset_by_node(stream.with_format("torch"), rank=rank, world_size=2)
        checkpoints, step, seen = Checkpoints(f"{folder}/checkpoints"), 0, []
        if resume:
            saved = checkpoints.latest()
            assert saved is not None
            where = checkpoints.load(saved, model, optimizer)
            assert where.own is not None
            step = where.step
            stream.load_state_dict(where.own["stream"])
        loader: Any = torch.utils.data.DataLoader(stream, batch_size=BATCH)
        for batch in shardwise.join(model, loader):
            seen.append(batch["x"].tolist())
            model(batch["x"].float()[:, None] / NUM_SAMPLES).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if save and step == saved_after:
                checkpoints.save(model, optimizer, step=step, own={"stream": stream.state_dict()})
                break
        checkpoints.close()
        return seen, shardwise.full_state_dict(model)["model"]

    whole, first, rest = run(), run(save=True), run(resume=True)
    return [whole, (first[0] + rest[0], rest[1])]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("saved_after", [1, 2])
def test_a_resumed_stream_gives_the_samples_and_the_weights_of_a_run_without_interruption(
    strategy: str, saved_after: int, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"x": n}) for n in range(NUM_SAMPLES)))
    ranks = run_ranks(train, num_ranks=2, args=(strategy, str(tmp_path), saved_after), timeout_seconds=100.0)
    for rank, ((seen, weights), (resumed, resumed_weights)) in enumerate(ranks):
        own = seen[: 3 - rank]
        assert resumed[: 3 - rank] == own
        assert [sample for batch in own for sample in batch] == list(range(rank, NUM_SAMPLES, 2))
        assert len(seen) == len(resumed) == 3
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
