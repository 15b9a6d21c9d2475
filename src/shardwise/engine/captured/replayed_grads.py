"""Compares replayed gradients with those of the same step, run as an ordinary one."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardwise.program.buffers import SAMPLED_EVERY

# Kernels sum in another order each time; the difference is larger in a narrow dtype.
_MOST_DISTANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_MOST_DISTANCE_OF_NARROW = 5e-2


def most_distance(dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest distance of gradients that is allowed for a model that computes in these dtypes."""
    return max(_MOST_DISTANCE.get(dtype, _MOST_DISTANCE_OF_NARROW) for dtype in dtypes)


def sampled(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return views of the elements that are compared. Copies of all elements would need much memory."""
    return [None if grad is None else grad.detach().reshape(-1)[::SAMPLED_EVERY] for grad in grads]


class GradientComparison:
    """Listens to an ordinary step, and measures the distance of its gradients from replayed ones (samples of both)."""

    def __init__(self, replayed: list[Tensor | None], owned_grads: Callable[[], list[Tensor | None]]) -> None:
        self._replayed = replayed
        self._owned_grads = owned_grads
        self.distance = math.nan

    def passes_are_over(self) -> None:
        if math.isnan(self.distance):
            self.distance = gradient_distance(self._replayed, sampled(self._owned_grads()))


@torch.no_grad()
def gradient_distance(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """Return ‖ours - theirs‖ / ‖theirs‖ over all of them; 0 if theirs are not finite: the graph did not cause that."""
    if [grad is None for grad in ours] != [grad is None for grad in theirs]:
        return math.inf
    mine = [grad for grad in ours if grad is not None]
    other = [grad for grad in theirs if grad is not None]
    if not mine:
        return 0.0
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub(mine, other), dtype=torch.float64)).square().sum()
    total = torch.stack(torch._foreach_norm(other, dtype=torch.float64)).square().sum()
    norms = torch.stack([apart, total]).sqrt().tolist()
    if not math.isfinite(norms[1]):
        return 0.0
    return float(norms[0] / norms[1]) if norms[1] else float(norms[0] > 0)


def is_compared(number: int) -> bool:
    """Return whether a replay of this number is compared: 1, 10, 100, …"""
    while number >= 10 and number % 10 == 0:
        number //= 10
    return number == 1
