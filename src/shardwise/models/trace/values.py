"""Values that a model reads while it is traced.

Fake tensors have no values, so a model with `if mask.all():` could not be traced, or would take another branch than in
a real run. Therefore everything that follows from the batch alone (masks, positions, lengths) is also computed with
real values. Values that depend on weights stay unknown, and reading them raises an error.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import FakeTensor

# The assumed value of a random number between 0 and 1.
_DRAWN = 0.5
# Larger tensors are data, whose values do not steer a model.
_MOST_ELEMENTS = 1 << 22


class KnownValues:
    """Computes real values along with fake ones, as long as all inputs of an operation have them.

    The recorder calls `run`: a dispatch mode of its own would take longer than what it does.
    """

    def __init__(self) -> None:
        self._real: Any = WeakIdKeyDictionary()

    def know(self, fakes: Any, reals: Any) -> None:
        """Store the values of a structure of fake tensors."""
        for fake, real in zip(tree_leaves(fakes), tree_leaves(reals), strict=True):
            if isinstance(fake, Tensor) and not real.is_meta and real.numel() <= _MOST_ELEMENTS:
                # A copy: the model may write into its batch, and the next run needs the original.
                self._real[fake] = real.detach().cpu().clone()

    def run(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an operation, of whose inputs these are tensors."""
        known = all(self._is_known(tensor) for tensor in tensors)
        if known and func is torch.ops.aten._local_scalar_dense.default:
            with torch_private.disable_current_modes():
                return self._value(tensors[0]).item()
        out = func(*args, **options)
        if func is torch.ops.aten.rand.default and out.numel() == 1:
            # Such as `if torch.rand([]) < layerdrop`: most layers are kept, and that is the most expensive step.
            with torch_private.disable_current_modes():
                self._real[out] = torch.full(out.shape, _DRAWN, dtype=out.dtype)
            return out
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._forget(tensors)
            return out
        outputs = tensors_in(out)
        if outputs and all(output.numel() <= _MOST_ELEMENTS for output in outputs):
            self._compute(func, args, options, out=out)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        # A tensor that torch made from a Python number is not fake.
        return tensor in self._real or (not isinstance(tensor, FakeTensor) and tensor.numel() == 1)

    def _value(self, tensor: Tensor) -> Tensor:
        value: Tensor = self._real.get(tensor, tensor)
        return value

    def _compute(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], *, out: Any) -> None:
        real_args, real_options = tree_map_only(Tensor, self._value, (args, options))
        if options.get("device") is not None:
            real_options["device"] = torch.device("cpu")
        with torch_private.disable_current_modes(), torch.no_grad():
            real = func(*real_args, **real_options)
        for fake_leaf, real_leaf in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake_leaf, Tensor):
                self._real[fake_leaf] = real_leaf

    def _forget(self, tensors: list[Tensor]) -> None:
        """Drop the values of tensors that were written to, and of all that share their memory."""
        storages = {self._real[tensor].untyped_storage()._cdata for tensor in tensors if tensor in self._real}
        if storages:
            for fake, real in list(self._real.items()):
                if real.untyped_storage()._cdata in storages:
                    del self._real[fake]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the arguments or the results of an operation."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


@contextmanager
def answers_as_eager() -> Iterator[None]:
    """Inside, Hugging Face models do not notice that they are traced; else they would build explicit masks."""
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is None or not hasattr(asked, "is_fake_tensor"):
        yield
        return
    with patch.object(asked, "is_fake_tensor", lambda tensor: False):
        yield
