"""Cross-entropy that makes nothing as large as the logits in fp32.

The usual loss keeps the logits of every token in fp32, then their log-softmax, then its gradient: 12 bytes for each
token and word, often the peak of a step. Here forward goes through the tokens in parts; of each part it takes the loss
and softmax − one-hot, which is the gradient, in the dtype of the logits, and puts it where the logits were.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import InvalidModel

# As many whatever the batch, so that a step does the same for every size; of a part there is a copy in fp32.
_NUM_PARTS = 4
# Where the logits are kept as well, a copy counts for more.
_NUM_PARTS_KEPT = 16


def lean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over rows, in fp32 at least.

    Where gradients are wanted, the logits are written over, and backward can run once.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    loss: Tensor = _LeanCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return loss


def lean_cross_entropy_of_some(logits: Tensor, targets: Tensor, *, ignored: int, count: Tensor | None) -> Tensor:
    """The sum over the rows whose target is not `ignored`, divided by `count`, or by how many those are.

    For logits that somebody else may read: they stay, and their gradient lies next to them until backward, which can
    run once.
    """
    kept = targets != ignored
    total = kept.sum() if count is None else count
    places = torch.where(kept, targets, 0)
    loss: Tensor = _LeanOfSome.apply(logits, places, kept / total)  # type: ignore[no-untyped-call]
    return loss


class _LeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        num_rows = logits.shape[0]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        for part, wanted in zip(logits.chunk(_NUM_PARTS), targets.chunk(_NUM_PARTS), strict=True):
            log_probs = F.log_softmax(part, -1, dtype=dtype)
            places = wanted[:, None]
            total -= log_probs.gather(1, places).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, places, torch.full_like(places, -1.0, dtype=grad.dtype))
            torch.mul(grad, 1 / num_rows, out=part)
        # Not saved for backward: autograd would rightly say that it was written into.
        ctx.grad = logits
        return total / num_rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _used_up(ctx).mul_(grads[0]), None


class _LeanOfSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """`weights`: what each row counts for, in fp32."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total, ctx.grad = torch.zeros((), dtype=dtype, device=logits.device), torch.empty_like(logits)
        columns = (logits, targets[:, None], weights[:, None], ctx.grad)
        for part, places, weight, out in zip(*(each.chunk(_NUM_PARTS_KEPT) for each in columns), strict=True):
            probs = F.log_softmax(part, -1, dtype=dtype)
            total -= (probs.gather(1, places) * weight).sum()
            probs.exp_().scatter_add_(1, places, torch.full_like(places, -1.0, dtype=dtype))
            torch.mul(probs, weight, out=out)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _used_up(ctx).mul_(grads[0]), None, None


def _used_up(ctx: Any) -> Tensor:
    grad: Tensor | None = ctx.grad
    ctx.grad = None
    if grad is None:
        raise InvalidModel("a second backward through a lean loss: the first has used up its gradient")
    return grad
