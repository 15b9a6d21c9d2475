import json
import os
import random

import numpy as np
import torch

from shardwise.engine.random_states import random_states, restore_random_states
from shardwise.training.loop.randomness import deterministic_kernels, seed_everything

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    """A number of every generator; the normal ones keep a second number for the next call."""
    return (torch.rand(()).item(), torch.randn(()).item(), random.gauss(0, 1), random.random(), np.random.normal())


def test_restored_states_give_the_same_numbers_again() -> None:
    seed_everything(3, step=0, rank=0)
    draw()
    states = random_states(CPU)
    first = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != first
    plain = {name: value for name, value in states.items() if not isinstance(value, torch.Tensor)}
    restore_random_states({**states, **json.loads(json.dumps(plain))}, device=CPU)
    assert [draw() for _ in range(3)] == first


def test_seeds_differ_by_seed_step_and_rank() -> None:
    drawn = set()
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)):
        seed_everything(seed, step=step, rank=rank)
        drawn.add(draw())
    assert len(drawn) == 4


def test_deterministic_kernels_are_asked_for_in_the_block_alone() -> None:
    with deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()
