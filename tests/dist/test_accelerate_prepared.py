"""A prepared model that is handed to Accelerate: its loop trains as with Accelerate's own DDP."""

import os
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import preload, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise import Plan

preload("accelerate")

STRATEGIES = ("ddp", "zero2", "fsdp")
State = dict[str, list[Any]]


def train(strategy: str, *, accelerator: Any) -> State:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if strategy != "stock":
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    inputs = torch.arange(64.0).view(16, 4) / 64
    loader: Any = DataLoader(TensorDataset(inputs, inputs[:, :2] ** 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel) == (strategy == "stock")
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}


def looped(rank: int) -> dict[str, State]:
    """The states after Accelerate's own DDP, and after each strategy, on a rank as torchrun would have started it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with patch.dict(os.environ, place):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == 2
        try:
            return {strategy: train(strategy, accelerator=accelerator) for strategy in ("stock", *STRATEGIES)}
        finally:
            # Accelerate's own, of the whole process: a test after this one begins without them.
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@pytest.mark.ledger("accelerate-loop", outcome="right", under=STRATEGIES)
def test_an_accelerator_loop_trains_a_prepared_model_bit_for_bit_as_its_own_ddp() -> None:
    if find_spec("accelerate") is None:
        pytest.skip("needs accelerate")
    for states in run_ranks(looped, num_ranks=2):
        assert list(states) == ["stock", *STRATEGIES]
        assert all(state == states["stock"] for state in states.values())
