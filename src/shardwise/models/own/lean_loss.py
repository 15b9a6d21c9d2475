"""Cross-entropy without an fp32 copy of all logits.

The usual loss keeps the logits in fp32, their log-softmax and its gradient: 12 bytes per token and vocabulary entry,
often the peak of a step. Here forward processes the tokens in chunks. For each chunk it computes the loss and its
gradient, softmax − one-hot, in the dtype of the logits, and writes the gradient over the logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.base.errors import InvalidModel

# Independent of the batch size, so that every step runs the same operations. Each chunk has a copy in fp32.
_NUM_CHUNKS = 4
# More chunks where the logits are kept as well.
_NUM_CHUNKS_KEPT = 16


def lean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over rows, in fp32 or wider.

    If the logits require gradients, they are overwritten, and backward can run only once.
    """
    if not isinstance(logits, Tensor):
        # Of a head in tiles, whose loss is computed in tiles, too.
        return F.cross_entropy(logits.float(), targets)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    loss: Tensor = _LeanCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return loss


def lean_cross_entropy_of_some(logits: Tensor, targets: Tensor, *, ignored: int, count: Tensor | None) -> Tensor:
    """Return the sum over the rows whose target is not `ignored`, divided by `count` (default: their number).

    The logits are not overwritten, since other code may read them; their gradient is a second tensor until backward,
    which can run only once.
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
        for chunk, wanted in zip(logits.chunk(_NUM_CHUNKS), targets.chunk(_NUM_CHUNKS), strict=True):
            log_probs = F.log_softmax(chunk, -1, dtype=dtype)
            places = wanted[:, None]
            total -= log_probs.gather(1, places).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, places, torch.full_like(places, -1.0, dtype=grad.dtype))
            torch.mul(grad, 1 / num_rows, out=chunk)
        # Not saved with save_for_backward: autograd would object that it was modified.
        ctx.grad = logits
        return total / num_rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _take_grad(ctx).mul_(grads[0]), None


class _LeanOfSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """`weights` is the weight of each row in the sum, in fp32."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total, ctx.grad = torch.zeros((), dtype=dtype, device=logits.device), torch.empty_like(logits)
        columns = (logits, targets[:, None], weights[:, None], ctx.grad)
        for chunk, places, weight, out in zip(*(each.chunk(_NUM_CHUNKS_KEPT) for each in columns), strict=True):
            probs = F.log_softmax(chunk, -1, dtype=dtype)
            total -= (probs.gather(1, places) * weight).sum()
            probs.exp_().scatter_add_(1, places, torch.full_like(places, -1.0, dtype=dtype))
            torch.mul(probs, weight, out=out)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _take_grad(ctx).mul_(grads[0]), None, None


def _take_grad(ctx: Any) -> Tensor:
    grad: Tensor | None = ctx.grad
    ctx.grad = None
    if grad is None:
        raise InvalidModel("a second backward through a lean loss: the first has used up its gradient")
    return grad
