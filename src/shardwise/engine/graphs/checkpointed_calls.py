"""Calls of units inside of torch.utils.checkpoint, as Hugging Face models make them for gradient checkpointing.

A traced call there recomputes by itself: its graphs are recorded as those of a recomputed unit, and what it saves does
not come to the checkpoint. If the checkpoint runs all the same, for something that was saved next to the unit, it
gets the unit's values alone.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Given = tuple[tuple[Any, ...], dict[str, Any]]


def saving_itself() -> AbstractContextManager[None]:
    """Return a context in which autograd saves tensors as it does without hooks."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class CheckpointedCalls:
    """Which calls of units were traced inside of a checkpoint, and which of their results had gradients."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, dict[Any, list[bool]]] = weakref.WeakKeyDictionary()

    def add(self, checkpoint: Any, unit: object, *, result: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._calls.setdefault(checkpoint, {})[unit] = [leaf.requires_grad for leaf in leaves]

    def again(self, checkpoint: Any, unit: object, forward: Callable[..., Any], given: Given) -> Any:
        """Return the values of such a call without saving anything; NotImplemented if it was not traced."""
        found = self._calls.get(checkpoint, {}).get(unit)
        if found is None:
            return NotImplemented
        with torch.no_grad():
            result = forward(*given[0], **given[1])
        flags = iter(found)
        return tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(next(flags, False)), result)
