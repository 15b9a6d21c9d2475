"""A rank that runs out of device memory says what the memory was held for, where, and what to ask next."""

import gc
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from wrong import WIDTH, Blocks

import shardwise
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.plan import Plan

NUM_BYTES = 4 * 320
"""Of the parameters of one block, padded."""


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Full(nn.Module):
    """Raises what a device raises that is full: in its forward, or when backward comes to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        x = self.inner(x)
        return FullInBackward.apply(x) if self.fails == "backward" else x


def full(optimizer: Any, arguments: Any, options: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def runs_out(rank: int, strategy: str, where: str) -> list[str]:
    torch.manual_seed(0)
    model = Blocks()
    model.blocks[2].linear = failing = Full(model.blocks[2].linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:Block"))
    notes: list[str] = []
    for step in range(3):
        if step == 2:
            failing.fails = where
            if where == "update":
                optimizer.register_step_pre_hook(full)
        try:
            model(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
        except torch.OutOfMemoryError as error:
            assert str(error) == "CUDA out of memory. Tried to allocate 2.00 GiB"
            notes += error.__notes__
        optimizer.zero_grad()
    return notes


@pytest.mark.parametrize(("strategy", "where"), [("fsdp", "forward"), ("ddp", "backward"), ("zero2", "update")])
def test_the_error_tells_what_was_held_and_where_the_step_was(strategy: str, where: str) -> None:
    for rank, (note,) in enumerate(run_ranks(runs_out, num_ranks=2, args=(strategy, where))):
        place = {"forward": "in forward blocks.2", "backward": "in backward blocks.2", "update": ""}[where]
        first, held, states, ask = note.splitlines()
        assert first.startswith(f"rank {rank} ran out of memory in step 3, {where}")
        assert place in first
        # Of fsdp's four blocks two are whole: the one that computes and the next.
        whole, half = bytes_text(4 * NUM_BYTES), bytes_text(2 * NUM_BYTES)
        params, gathered, grads = {
            "fsdp": (half, half, "0 B"),
            "ddp": (whole, "0 B", whole),
            "zero2": (whole, "0 B", half),
        }[strategy]
        assert f"params {params}, gathered {gathered}, grads {grads}, reduce 0 B, optim " in held, held
        assert "activations are not counted on a CPU" in held
        assert states.startswith("  predicted peak without activations: ddp ")
        assert f"{strategy} " in states.partition(" (this plan)")[0].split(", ")[-1]
        assert "shardwise plan python:FILE.py:FUNCTION --cluster 2xDEVICE" in ask


def other_error(rank: int) -> list[str]:
    model = Blocks()
    shardwise.prepare(model, None, Plan())
    del model
    gc.collect()
    return getattr(torch.OutOfMemoryError("full"), "__notes__", [])


def test_an_error_of_a_process_without_a_prepared_model_is_left_alone() -> None:
    assert run_ranks(other_error, num_ranks=1) == [[]]
