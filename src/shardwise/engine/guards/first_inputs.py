"""Warns once if ranks train on the same batch, as they do with a loader without a distributed sampler.

All ranks are data parallel under every plan, so no two of them should share a batch. Only the first step is checked.

Without it they do the work of one: the loss falls as it would on a single rank, and nothing else shows it. Since
b5c533d1 (the first engine).
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.hooks.step_hooks import transforming
from shardwise.program.units import called_modules

# Elements of a tensor that are compared, evenly spread, so that no batch of images is copied from a GPU.
_MOST_ELEMENTS = 1 << 16


class FirstInputs:
    """A digest of the inputs of this rank's model in the first step."""

    def __init__(self) -> None:
        self._digest: str | None = None
        # In a rehearsal (comm/job/absent.py) the other ranks are absent.
        self.compares = dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> list[Any]:
        """Digest the model's inputs until the ranks have compared them. Returns the handles of the hooks."""
        if not self.compares:
            return []
        self._handles = [
            called.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True)
            for called in called_modules(model)
        ]
        return self._handles

    def compare(self) -> None:
        """Warn, on rank 0, if ranks have equal inputs; then remove the hooks. Collective, the first time."""
        if not self.compares:
            return
        self.compares = False
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

    @disable_dynamo
    def _look(self, module: nn.Module, inputs: Any, options: Any) -> None:
        if torch.is_grad_enabled() and not transforming():
            self._digest = digest((inputs, options))


def _ranks_alike(digests: Sequence[str | None]) -> str:
    """Return the first ranks with equal digests, in words; "" if all differ or there are no digests."""
    for digest in digests:
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        if digest is not None and len(ranks) > 1:
            if len(ranks) == len(digests):
                return f"all {len(ranks)} ranks"
            return f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
    return ""


@torch.no_grad()
def digest(inputs: Any) -> str | None:
    """Return a hash of all tensors in `inputs`; None if all of them are constant."""
    hashed = hashlib.blake2b(digest_size=16)
    varies = False
    for tensor in tree_leaves(inputs):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _MOST_ELEMENTS))].contiguous().cpu()
        elements = sample.view(torch.uint8).view(-1, sample.element_size())
        # A constant (a mask, a batch of zeros in a trial) may be the same on all ranks.
        if bool((elements != elements[:1]).any()):
            varies = True
            hashed.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            hashed.update(elements.numpy().tobytes())
    return hashed.hexdigest() if varies else None
