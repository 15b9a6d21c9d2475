"""A loop in Ray Train's TorchTrainer: prepared by Shardwise against `ray.train.torch.prepare_model`. One process.

Ray starts its workers and joins them into a process group, which `shardwise.prepare` finds: there is no glue.
"""

import os
from pathlib import Path
from typing import Any

import ray
import torch
from comparison import STOCK, Trained, asked, distance, write
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    from torch import nn

    import shardwise
    from shardwise import Plan

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    rank = ray.train.get_context().get_world_rank()
    if config["strategy"] == "stock":
        model = ray.train.torch.prepare_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        shardwise.prepare(model, optimizer, Plan(strategy=config["strategy"]))
    losses = []
    for step in range(6):
        x = torch.arange(16.0).view(4, 4) / 16 + step + rank / 2
        loss = nn.functional.mse_loss(model(x), x[:, :2].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
    torch.save((losses, weights), f"{config['folder']}/{config['strategy']}-{rank}.pt")


def train(strategy: str, folder: Path) -> list[Trained]:
    """What came of it on each rank."""
    TorchTrainer(
        loop,
        train_loop_config={"strategy": strategy, "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder), name=strategy),
    ).fit()
    saved = [torch.load(folder / f"{strategy}-{rank}.pt") for rank in range(2)]
    return [Trained(numbers=losses, weights=weights) for losses, weights in saved]


def main() -> None:
    folder, strategies = asked()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "GLOO_SOCKET_IFNAME") if name in os.environ}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    stock = train(STOCK, folder)
    distances = {
        strategy: max(distance(ours, theirs) for ours, theirs in zip(train(strategy, folder), stock, strict=True))
        for strategy in strategies
    }
    ray.shutdown()
    write({"Ray TorchTrainer loop": {"bound": 0.0, "distance": distances}})


if __name__ == "__main__":
    main()
