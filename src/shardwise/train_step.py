"""One call for a step of your own loop: forward, loss, backward, clipping, update; as CUDA graphs, as the plan says."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engines import accumulate, capture, clip_grad_norm_
from shardwise.errors import InvalidData


class TrainStep:
    """A step of a training; `step` below makes it.

    grad_norm   of the last step, before clipping; None where nothing is clipped
    captured    whether the last step was a replay of CUDA graphs
    """

    def __init__(self, take: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self._take = take
        self.grad_norm: Tensor | None = None

    def __call__(self, *batches: Any) -> Tensor:
        if not batches:
            raise InvalidData("step() was given no batch: give it one, or one for each pass of an accumulation")
        loss, self.grad_norm = self._take(*batches)
        return loss

    @property
    def captured(self) -> bool:
        report = getattr(self._take, "report", None)
        return report is not None and report.captured


def step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    max_norm: float | None = None,
    scaler: GradScaler | None = None,
    tell: Callable[[str], None] | None = None,
) -> TrainStep:
    """A whole training step of a prepared model as one call. Collective: every rank calls it.

        step = shardwise.step(model, optimizer, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
        for batch in batches:
            loss = step(batch)

    Forward, `loss_fn(model, batch)`, backward, optimizer.step() and zero_grad(), captured as the plan's `capture` says
    (see `capture`). The loss comes back detached, on its device: this rank's own, not waited for. `step(first, second)`
    accumulates: a pass for each batch, one update by the mean of their losses.

    max_norm   gradients are clipped to it; `step.grad_norm` is the norm that they had
    scaler     a shardwise.GradScaler, for precision = 'fp16'
    tell       is given a line for each thing that is decided of capturing, on rank 0; without it they are warnings
    """
    scaling = scaler if scaler is not None else GradScaler(enabled=False)

    def take(*batches: Any) -> tuple[Tensor, Tensor | None]:
        losses = []
        for number, batch in enumerate(batches):
            with accumulate(model, enabled=number + 1 < len(batches)):
                loss = loss_fn(model, batch) / len(batches)
                scaling.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        grad_norm = None
        if max_norm is not None:
            scaling.unscale_(optimizer)
            grad_norm = clip_grad_norm_(model, max_norm)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        return sum(losses[1:], start=losses[0]), grad_norm

    return TrainStep(capture(take, model, optimizer, functions=(loss_fn,), tell=tell))
