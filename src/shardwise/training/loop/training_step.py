"""One optimizer step: forward and backward of each pass, clipping, update. `shardwise.step` makes it one call.

The training loop (loop.py), the memory probe and `shardwise.step` all run these functions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidData
from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engines import accumulate, clip_grad_norm_, require_engine

Pass = Callable[[], Tensor]
"""The forward of one pass; returns the part that it adds to the loss of the step."""


def run_step(
    model: nn.Module,
    optimizer: Optimizer,
    passes: Sequence[Pass],
    *,
    scaler: GradScaler,
    max_norm: float | None,
    accepts: Callable[[Tensor], bool] = lambda grad_norm: True,
) -> tuple[list[Tensor], Tensor | None]:
    """Run all passes and update once; return the losses, and the norm that the gradients had before clipping.

    max_norm   gradients are clipped to it; None: the norm is not computed
    accepts    decides from the norm, where it is computed, whether the optimizer steps
    """
    losses = run_passes(model, passes, scaler=scaler)
    grad_norm = None
    if max_norm is not None:
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm_(model, max_norm)
    if grad_norm is None or accepts(grad_norm):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return losses, grad_norm


def run_passes(model: nn.Module, passes: Sequence[Pass], *, scaler: GradScaler) -> list[Tensor]:
    """Run forward and backward of each pass, and return the losses; the last pass reduces."""
    losses = []
    for number, forward in enumerate(passes):
        with accumulate(model, enabled=number + 1 < len(passes)):
            losses.append(_run_pass(forward, scaler))
    return losses


def _run_pass(forward: Pass, scaler: GradScaler) -> Tensor:
    # A function of its own, so that a loss and its graph end with its pass.
    loss = forward()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class TrainStep:
    """What `step` returns: a step as one call.

    grad_norm   of the last step, before clipping; None if it is not computed
    """

    def __init__(self, take: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self._take = take
        self.grad_norm: Tensor | None = None

    def __call__(self, *batches: Any) -> Tensor:
        if not batches:
            raise InvalidData("step() was given no batch: give it one, or one for each pass of an accumulation")
        loss, self.grad_norm = self._take(*batches)
        return loss


def step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    max_norm: float | None = None,
    scaler: GradScaler | None = None,
) -> TrainStep:
    """Return a training step of a prepared model as one call.

        step = shardwise.step(model, optimizer, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
        for batch in batches:
            loss = step(batch)

    It runs forward, `loss_fn(model, batch)`, backward, optimizer.step() and zero_grad(). The returned loss is this
    rank's own, detached and on its device; the call does not wait for it. `step(first, second)` accumulates: one pass
    per batch, one update by the mean of their losses.

    max_norm   gradients are clipped to it; `step.grad_norm` is the norm before clipping
    scaler     a shardwise.GradScaler, for precision = 'fp16'
    """
    require_engine(model)
    scaling = scaler if scaler is not None else GradScaler(enabled=False)

    def take(*batches: Any) -> tuple[Tensor, Tensor | None]:
        passes = [partial(_mean_part, loss_fn, model, batch, len(batches)) for batch in batches]
        losses, grad_norm = run_step(model, optimizer, passes, scaler=scaling, max_norm=max_norm)
        return sum(losses[1:], start=losses[0]), grad_norm

    return TrainStep(take)


def _mean_part(loss_fn: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any, num_passes: int) -> Tensor:
    return loss_fn(model, batch) / num_passes
