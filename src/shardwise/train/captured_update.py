"""A step of a training, captured as its plan says."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engines import capture
from shardwise.train.loop import Training, update


class CapturedUpdate:
    """`update` as CUDA graphs where that can be. What is decided is collected for the metrics."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._notes: list[str] = []
        self._step: Callable[..., Any] | None = None

    def __call__(
        self, training: Training, weights: tuple[float, ...], batches: list[Any]
    ) -> tuple[Tensor, Tensor | None]:
        if self._step is None:
            self._step = self._captured(training)
        result: tuple[Tensor, Tensor | None] = self._step(weights, batches)
        return result

    def _captured(self, training: Training) -> Callable[..., Any]:
        def step(weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
            return update(training, weights, batches)

        plan, device_type = training.config.plan, training.device.type
        if training.config.train.nonfinite == "skip" and plan.capture == "auto" and device_type == "cuda":
            self._notes.append("capture: ordinary steps, not captured: train.nonfinite = 'skip' reads the norm in each")
            return step
        return capture(step, self._model, self._optimizer, functions=(training.task.loss,), tell=self._notes.append)

    def take_report(self) -> tuple[bool, str | None]:
        """Of the last step: whether it was replayed, and what was decided in it."""
        report = getattr(self._step, "report", None)
        notes, self._notes[:] = "; ".join(self._notes), []
        return bool(report and report.captured), notes or None
