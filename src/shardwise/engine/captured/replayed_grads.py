"""Replayed gradients compared with those of the same step, run as an ordinary one."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardwise.program.buffers import SAMPLED_EVERY

# Kernels add up in another order each time, in a narrow dtype with a larger difference.
_MOST_DISTANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_MOST_DISTANCE_OF_NARROW = 5e-2


def most_distance(dtypes: Iterable[torch.dtype]) -> float:
    """How far gradients of a model that computes in these dtypes may be from each other."""
    return max(_MOST_DISTANCE.get(dtype, _MOST_DISTANCE_OF_NARROW) for dtype in dtypes)


def sampled(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The elements of gradients that are compared: views. Copies of whole ones would be a large part of the memory."""
    return [None if grad is None else grad.detach().reshape(-1)[::SAMPLED_EVERY] for grad in grads]


class GradientComparison:
    """Watches an ordinary step: how far a sample of its gradients is from a replayed one, as a share of its norm."""

    def __init__(self, replayed: list[Tensor | None], owned_grads: Callable[[], list[Tensor | None]]) -> None:
        self._replayed = replayed
        self._owned_grads = owned_grads
        self.distance = math.nan

    def last_backward_begins(self) -> None: ...

    def passes_are_over(self) -> None:
        if math.isnan(self.distance):
            self.distance = gradient_distance(self._replayed, sampled(self._owned_grads()))


@torch.no_grad()
def gradient_distance(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all of them; 0 where theirs are not finite, which no graph is to blame for."""
    if [grad is None for grad in ours] != [grad is None for grad in theirs]:
        return math.inf
    mine = [grad for grad in ours if grad is not None]
    other = [grad for grad in theirs if grad is not None]
    if not mine:
        return 0.0
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub(mine, other), dtype=torch.float64)).square().sum()
    whole = torch.stack(torch._foreach_norm(other, dtype=torch.float64)).square().sum()
    norms = torch.stack([apart, whole]).sqrt().tolist()
    if not math.isfinite(norms[1]):
        return 0.0
    return float(norms[0] / norms[1]) if norms[1] else float(norms[0] > 0)


def is_compared(number: int) -> bool:
    """1, 10, 100, …"""
    while number >= 10 and number % 10 == 0:
        number //= 10
    return number == 1
