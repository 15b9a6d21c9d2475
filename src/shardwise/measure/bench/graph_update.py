"""Captures the step of any engine in one CUDA graph, as PyTorch's documentation says ("CUDA graphs", "Usage with
DistributedDataParallel"): the model is set up on a side stream; after eleven ordinary steps, one is captured with its
inputs at fixed addresses, and replayed from then on.

It does not check what may change between steps: all steps of a bench are alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.base.errors import InvalidData
from shardwise.training.loop.batches import to_device
from shardwise.training.loop.training_state import Training, Update

# DDP rebuilds its buckets after its first step, and times its first ten (torch's "CUDA graphs": "at least 11").
_ORDINARY_STEPS = 11


class GraphUpdate:
    """`update`, captured. `stream` is the one that the model was set up on."""

    def __init__(self, update: Update, *, stream: torch.cuda.Stream) -> None:
        self._update = update
        self._stream = stream
        self._num_taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[tuple[float, ...], list[Any]] | None = None
        self._outputs: tuple[Tensor, Tensor | None] | None = None

    def __call__(
        self, training: Training, weights: tuple[float, ...], batches: list[Any]
    ) -> tuple[Tensor, Tensor | None]:
        self._num_taken += 1
        if self._num_taken <= _ORDINARY_STEPS:
            with on_stream(self._stream):
                return self._update(training, weights, batches)
        if self._graph is None:
            self._capture(training, weights, batches)
        self._fill(weights, batches)
        assert self._graph is not None
        assert self._outputs is not None
        self._graph.replay()
        # The next replay overwrites its outputs.
        total, norm = self._outputs
        return total.clone(), None if norm is None else norm.clone()

    def _capture(self, training: Training, weights: tuple[float, ...], batches: list[Any]) -> None:
        """Capture the step without running it."""
        inputs = tree_map_only(Tensor, Tensor.clone, to_device(batches, training.device))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads (NCCL's watchdog, data loaders) may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = self._update(training, weights, inputs)
        self._graph, self._inputs = graph, (weights, inputs)

    def _fill(self, weights: tuple[float, ...], batches: list[Any]) -> None:
        assert self._inputs is not None
        known, places = self._inputs
        pairs = list(zip(_tensors(places), _tensors(batches), strict=True))
        if weights != known or any(place.shape != value.shape for place, value in pairs):
            raise InvalidData("a captured step has another batch than the one it was captured with")
        for place, value in pairs:
            place.copy_(value, non_blocking=True)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on a side stream, ordered with what comes before and after."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def counts_on_device(optimizer: Optimizer, *, device: torch.device) -> None:
    """Put learning rates and step counters on the device, where a graph reads them; call it before the first step."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
        group["capturable"] = True


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
