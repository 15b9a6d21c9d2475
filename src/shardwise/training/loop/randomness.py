"""Random numbers, seeded by (seed, step, rank) and saved with each checkpoint; deterministic kernels."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# cuBLAS sums in another order with each workspace; torch's documentation names this setting.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def seed_everything(seed: int, *, step: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators, differently on each rank: dropout must differ between ranks."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)
    random.seed(int(words[1]))
    np.random.seed(int(words[1]) & (2**32 - 1))


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Use only kernels that give the same bits each time; torch raises if an operation has none.

    Enter it before CUDA is used: cuBLAS reads its setting once.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    variable, value = _CUBLAS
    workspace = os.environ.get(variable)
    os.environ.setdefault(variable, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            del os.environ[variable]
