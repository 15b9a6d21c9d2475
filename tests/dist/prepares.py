"""A user's script for test_join.py: `prepares.py FOLDER ENGINE NUMBER` takes one step after `prepare`.

Weights and data depend on NUMBER; what it found is written to FOLDER/NUMBER.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import listening
from torch import nn

import shardwise
from shardwise import Plan


def take_step(engine: str, number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = shardwise.prepare(model, optimizer, Plan(strategy="ddp", engine=engine))
    prepared(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    return {
        "rank": dist.get_rank(),
        "num_ranks": dist.get_world_size(),
        "weights": [parameter.detach().flatten().tolist() for parameter in model.parameters()],
        "listening": sorted(listening({os.getpid()})),
    }


def main() -> None:
    folder, engine, number = sys.argv[1:]
    found = take_step(engine, int(number))
    Path(folder, f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
