"""Random numbers, seeded by (seed, step, rank) and saved with each checkpoint; deterministic kernels."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator that a training may draw from, as JSON and tensors."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], *, device: torch.device) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


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
