"""Warns once if ranks train on the same batch, as a loader without a distributed sampler makes them.

All ranks under every plan of ours are data parallel, so none has a reason to share a batch. Only the first step is
looked at.
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from shardwise.comm.agreement import exchange
from shardwise.units import called_modules

# Elements of a tensor that are looked at, evenly spread: a batch of images is not copied from a GPU for this.
_MOST_ELEMENTS = 1 << 16


class FirstInputs:
    """What this rank's model was given in the first step."""

    def __init__(self) -> None:
        self._digest: str | None = None
        # In a rehearsal (comm/absent.py) every other rank has what this one has.
        self._compares = dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> list[Any]:
        """Look at what the model is given until the ranks have compared it; handles that end this."""
        if not self._compares:
            return []
        self._handles = [
            called.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True)
            for called in called_modules(model)
        ]
        return self._handles

    def compare(self) -> None:
        """Warn, on rank 0, where ranks were given the same; then look no more. Collective, the first time."""
        if not self._compares:
            return
        self._compares = False
        digests: list[str | None] = exchange(self._digest)
        for handle in self._handles:
            handle.remove()
        same = _ranks_alike(digests)
        if same and dist.get_rank() == 0:
            warnings.warn(
                f"{same} were given the same batch in the first step, so they repeat each other's work: give each "
                "rank its own samples, with shardwise.DistributedSampler or torch's DistributedSampler in the "
                "DataLoader",
                stacklevel=2,
            )

    @_disable_dynamo
    def _look(self, module: nn.Module, inputs: Any, options: Any) -> None:
        if torch.is_grad_enabled():
            self._digest = digest((inputs, options))


def _ranks_alike(digests: Sequence[str | None]) -> str:
    """The first ranks that were given the same, in words; "" where all differ or nothing tells them apart."""
    for digest in digests:
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        if digest is not None and len(ranks) > 1:
            if len(ranks) == len(digests):
                return f"all {len(ranks)} ranks"
            return f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
    return ""


@torch.no_grad()
def digest(inputs: Any) -> str | None:
    """Of the tensors in here, wherever they lie; None where there is none that tells one batch from another."""
    hashed = hashlib.blake2b(digest_size=16)
    tells = False
    for tensor in tree_leaves(inputs):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _MOST_ELEMENTS))].contiguous().cpu()
        elements = sample.view(torch.uint8).view(-1, sample.element_size())
        # A constant (a mask, a batch of zeros to try something out) may well be the same everywhere.
        if bool((elements != elements[:1]).any()):
            tells = True
            hashed.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            hashed.update(elements.numpy().tobytes())
    return hashed.hexdigest() if tells else None
