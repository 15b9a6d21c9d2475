"""One call for a step of your own loop: forward, loss, backward, clipping, update; as CUDA graphs, as the plan says."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.optimizer.allocate import allocate_states
from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engine.out_of_memory.smaller_plan import smaller_plan
from shardwise.engine.out_of_memory.survive import NoGuard, StepGuard, StepUndone
from shardwise.engine.out_of_memory.surviving import Surviving, warn
from shardwise.engine.protocol import require_engine
from shardwise.engines import accumulate, capture, clip_grad_norm_
from shardwise.errors import InvalidData


class TrainStep:
    """A step of a training; `step` below makes it.

    grad_norm   of the last step, before clipping; None where nothing is clipped
    captured    whether the last step was a replay of CUDA graphs
    """

    def __init__(
        self, take: Callable[..., tuple[Tensor, Tensor | None]], *, shrink: Callable[[StepUndone], object]
    ) -> None:
        self._take = take
        self._shrink = shrink
        self.grad_norm: Tensor | None = None

    def __call__(self, *batches: Any) -> Tensor:
        if not batches:
            raise InvalidData("step() was given no batch: give it one, or one for each pass of an accumulation")
        while True:
            try:
                loss, self.grad_norm = self._take(*batches)
                return loss
            except StepUndone as undone:
                self._shrink(undone)

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
    survive: int = 0,
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
    tell       is given a line for each thing that is decided, on rank 0; without it they are warnings
    survive    so often a rank may run out of memory in forward or backward: the step is undone on all ranks, the model
               gets a plan that needs less (shardwise.replan), and the same batches run again. Steps are not captured
               then, and on a GPU each waits for its gradients before it updates
    """
    guard = _guard(model, optimizer) if survive else NoGuard()
    surviving = Surviving(model, most=survive, smaller=lambda: smaller_plan(model), tell=tell or warn)
    scaling = scaler if scaler is not None else GradScaler(enabled=False)

    def one_pass(batch: Any, num_passes: int) -> Tensor:
        loss = loss_fn(model, batch) / num_passes
        scaling.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def take(*batches: Any) -> tuple[Tensor, Tensor | None]:
        guard.begin()
        losses = []
        for number, batch in enumerate(batches):
            with accumulate(model, enabled=number + 1 < len(batches)):
                loss = guard.run(partial(one_pass, batch, len(batches)))
            losses += [loss] if loss is not None else []
        guard.agree()
        grad_norm = None
        if max_norm is not None:
            scaling.unscale_(optimizer)
            grad_norm = clip_grad_norm_(model, max_norm)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        return sum(losses[1:], start=losses[0]), grad_norm

    # A graph allocates nothing, so that a replay has nothing to survive; but what is guarded cannot be recorded.
    run = take if survive else capture(take, model, optimizer, functions=(loss_fn,), tell=tell)
    return TrainStep(run, shrink=surviving.shrink)


def _guard(model: nn.Module, optimizer: Optimizer) -> StepGuard:
    """Steps that survive a lack of memory; what an update would allocate is there before the first."""
    engine = require_engine(model)
    engine.check("step", model, argument="survive")
    engine.adopt(model, optimizer)
    allocate_states(optimizer)
    return StepGuard(model)
