"""The values that a model looks at while it is traced.

Fake tensors have none, so that a model that asks `if mask.all():` could not be traced, or would take another way than
in a real run. So what follows from the batch's own values alone (masks, positions, lengths) is computed alongside, and
asked for, answered. What follows from weights is not known, and asking for it is refused as before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

# What a number that is drawn between 0 and 1 counts as.
_DRAWN = 0.5
# Larger tensors are data, which nobody looks at.
_MOST_ELEMENTS = 1 << 22


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with real values next to fake ones, as long as all inputs of an operation have them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: Any = WeakIdKeyDictionary()

    def know(self, fakes: Any, reals: Any) -> None:
        """The values of a structure of fake tensors."""
        for fake, real in zip(tree_leaves(fakes), tree_leaves(reals), strict=True):
            if isinstance(fake, Tensor) and not real.is_meta and real.numel() <= _MOST_ELEMENTS:
                # A copy: what the model writes into its batch is not for the next run.
                self._real[fake] = real.detach().cpu().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        known = all(self._is_known(tensor) for tensor in tensors)
        if known and func is torch.ops.aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self._value(tensors[0]).item()
        out = func(*args, **options)
        if func is torch.ops.aten.rand.default and out.numel() == 1:
            # Such as `if torch.rand([]) < layerdrop`: most layers are not dropped, and then a step takes the most.
            with _disable_current_modes():
                self._real[out] = torch.full(out.shape, _DRAWN, dtype=out.dtype)
            return out
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._forget(tensors)
            return out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if outputs and all(output.numel() <= _MOST_ELEMENTS for output in outputs):
            self._compute(func, args, options, out=out)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        # A number that torch made a tensor of is not fake.
        return tensor in self._real or (not isinstance(tensor, FakeTensor) and tensor.numel() == 1)

    def _value(self, tensor: Tensor) -> Tensor:
        value: Tensor = self._real.get(tensor, tensor)
        return value

    def _compute(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], *, out: Any) -> None:
        real_args, real_options = tree_map_only(Tensor, self._value, (args, options))
        if options.get("device") is not None:
            real_options["device"] = torch.device("cpu")
        with _disable_current_modes(), torch.no_grad():
            real = func(*real_args, **real_options)
        for fake_leaf, real_leaf in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake_leaf, Tensor):
                self._real[fake_leaf] = real_leaf

    def _forget(self, tensors: list[Tensor]) -> None:
        """Something unknown may have been written into these, and so into all that share their memory."""
        storages = {self._real[tensor].untyped_storage()._cdata for tensor in tensors if tensor in self._real}
        if storages:
            for fake, real in list(self._real.items()):
                if real.untyped_storage()._cdata in storages:
                    del self._real[fake]


@contextmanager
def answers_as_eager() -> Iterator[None]:
    """Inside, a model that asks whether it is traced hears no: Hugging Face's build explicit masks then."""
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is None or not hasattr(asked, "is_fake_tensor"):
        yield
        return
    with patch.object(asked, "is_fake_tensor", _no):
        yield


def _no(tensor: Any) -> bool:
    return False
