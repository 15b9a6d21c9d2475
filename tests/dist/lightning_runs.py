"""Runs of Lightning's Trainer on ranks of the pool, compared with one process of Lightning."""

import logging
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import preload
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwise.plan import Plan

preload("lightning.pytorch")

NUM_SAMPLES = 24


def needs_lightning() -> None:
    if find_spec("lightning") is None:
        pytest.skip("needs lightning")


def samples() -> TensorDataset:
    inputs = torch.arange(4.0 * NUM_SAMPLES).view(NUM_SAMPLES, 4) / NUM_SAMPLES
    return TensorDataset(inputs, inputs[:, :2].sin())


def strategy_of(name: str | None) -> Any:
    """Ours, with units that are small enough to be several; without a name, Lightning's own of one process."""
    if name is None:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        return SingleDeviceStrategy(torch.device("cpu"))
    from shardwise.integrations import ShardwiseStrategy

    return ShardwiseStrategy(plan=Plan(strategy=name, units="leaf"))


def fit(
    module: Any,
    name: str | None,
    *,
    callbacks: tuple[Any, ...] = (),
    max_epochs: int = 3,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """Fit on batches of 4 per rank; without a strategy's name, in this process alone on batches of the same samples."""
    import lightning

    num_ranks = 1 if name is None else dist.get_world_size()
    rank = 0 if name is None else dist.get_rank()
    sampler: Any = DistributedSampler(samples(), num_replicas=num_ranks, rank=rank, shuffle=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy_of(name),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=8 // num_ranks, sampler=sampler), ckpt_path=resume)
    return trainer


def difference(rank: int, train: Callable[..., dict[str, Tensor]], strategy: str, *arguments: Any) -> float:
    """Train as torchrun would have started it; return the largest difference from training in this process alone."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "tests"}
    sizes = {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with patch.dict(os.environ, {name: str(value) for name, value in (place | sizes | ports).items()}):
        expected, found = train(None, *arguments), train(strategy, *arguments)
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def make_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
