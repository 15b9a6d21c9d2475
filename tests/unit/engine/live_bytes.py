"""What operations run, and which of the tensors that they made are still alive."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Around a forward or a backward: counts operations, and follows the memory of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return outputs

    def live_bytes(self, *, besides: list[Tensor]) -> int:
        """Memory that was made here and is alive, without that of `besides`, which views may share."""
        known = {tensor.untyped_storage()._cdata for tensor in besides}
        return sum(
            num_bytes
            for address, (reference, num_bytes) in self._storages.items()
            if address not in known and not torch.UntypedStorage._expired(reference.cdata)
        )
