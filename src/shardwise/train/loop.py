"""The training loop: an ordinary one, step after step, on one rank."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.data.sampler import DistributedSampler
from shardwise.engine.captured.compile_clock import CompileClock
from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engine.out_of_memory.survive import NoGuard
from shardwise.engines import accumulate, clip_grad_norm_
from shardwise.launch.failure import during
from shardwise.tasks import Task
from shardwise.train.batches import Sharing, samples_seen, to_device, tokens_per_sample
from shardwise.train.config import TrainConfig
from shardwise.train.evaluation import evaluate
from shardwise.train.first_nonfinite import FirstNonFinite, find_first_nonfinite
from shardwise.train.learning_rate import lr_at
from shardwise.train.metrics import MetricsRecorder, StepMetrics, Taken, Window
from shardwise.train.nonfinite import NonFinite, check_finite
from shardwise.train.optimizers import set_lr
from shardwise.train.preemption import Preemption
from shardwise.train.randomness import random_states
from shardwise.vocabulary.quantities import seconds_text

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoints


@dataclass(slots=True, kw_only=True)
class Training:
    """All that a step changes or reads. `step` is the last one taken, `num_steps` the last one to take."""

    config: TrainConfig
    task: Task
    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    sampler: DistributedSampler
    sharing: Sharing
    batches: Iterator[Any]
    device: torch.device
    step: int
    num_steps: int
    # `update`, perhaps as CUDA graphs.
    update: "Update"
    # Of the steps that were not read yet.
    nonfinite: FirstNonFinite | None = None
    # Whether a rank may run out of memory in a step (surviving_update.py).
    guard: NoGuard = field(default_factory=NoGuard)
    # Where one may: the random states before the batches of this step were read.
    before_read: dict[str, Any] | None = None
    # Shows a line to the user, on rank 0.
    tell: Callable[[str], None] = lambda line: None

    def progress(self) -> dict[str, Any]:
        """What is the same on every rank: the schedule is a function of the step, so this is all."""
        return {"sampler": self.sampler.state_dict(), "scaler": self.scaler.state_dict()}


def run_steps(
    training: Training, *, checkpoints: "Checkpoints", request: Preemption, recorder: MetricsRecorder
) -> bool:
    """Train to the last step, or until the ranks agree to stop; whether they did. Always ends on a checkpoint."""
    options = training.config.train
    window = Window(device=training.device, num_ranks=training.sharing.num_ranks)
    first_step, began = training.step + 1, perf_counter()
    stop = False
    while training.step < training.num_steps and not stop:
        with during(f"step {training.step + 1}"):
            window.add(take_step(training))
        stop = request.agreed()
        if training.step == first_step and options.log_every > 1:
            took = seconds_text(perf_counter() - began)
            training.tell(f"First step took {took}; metrics follow every {options.log_every} steps.")
        last = training.step == training.num_steps
        evaluates = _evaluates(training, last=last)
        saves = stop or last or _due(training.step, training.config.checkpoint.every)
        stops = training.nonfinite is not None and options.nonfinite == "stop"
        if evaluates or saves or stops or _due(training.step, options.log_every):
            steps = window.read()
            _check_finite(training, steps, window=window, recorder=recorder)
            if evaluates:
                steps[-1] = replace(steps[-1], evaluation=evaluate_now(training))
            recorder.record(steps)
            if saves:
                save(training, checkpoints)
            window.restart_clock()
    return stop and training.step < training.num_steps


def _check_finite(training: Training, steps: list[StepMetrics], *, window: Window, recorder: MetricsRecorder) -> None:
    try:
        check_finite(
            steps,
            ranks_of=window.ranks_of_nonfinite,
            found=training.nonfinite,
            policy=training.config.train.nonfinite,
            scaled=training.scaler.is_enabled(),
            tells=training.sharing.rank == 0,
        )
    except NonFinite:
        # Its metrics are what the user looks at next.
        recorder.record(steps)
        raise
    training.nonfinite = None


Update = Callable[["Training", tuple[float, ...], list[Any]], tuple[Tensor, Tensor | None]]
"""(training, weights of the passes, their batches) → (loss, norm of the gradients)."""


def take_step(training: Training) -> Taken:
    """One optimizer step, of all the passes that make it; nothing in here waits for the device, but for fp16."""
    training.step += 1
    lr = lr_at(
        training.step,
        schedule=training.config.schedule,
        lr=training.config.optimizer.lr,
        num_steps=training.num_steps,
    )
    set_lr(training.optimizer, lr)
    passes = next_passes(training)
    with CompileClock() as clock:
        loss, grad_norm = training.update(training, passes.weights, passes.batches)
    captured, capture_note = _reported(training.update)
    tokens = tokens_per_sample(passes.batches[0])
    training.sampler.advance(passes.num_samples)
    return Taken(
        step=training.step,
        lr=lr,
        num_samples=passes.num_samples,
        num_tokens=None if tokens is None else tokens * passes.num_samples,
        epoch=training.sampler.epoch,
        position=training.sampler.position,
        loss=loss,
        grad_norm=grad_norm,
        compile_seconds=clock.seconds if clock.num_compiles else None,
        captured=captured,
        capture_note=capture_note,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPasses:
    """The weight and the batch of each pass of a step on this rank, and the samples of all ranks together."""

    weights: tuple[float, ...]
    batches: list[Any]
    num_samples: int


def next_passes(training: Training) -> StepPasses:
    """Read the batches of the step that comes next; the sampler stays where it is."""
    sharing = training.sharing
    share = sharing.share(samples_seen(training.sampler))
    assert share is not None
    training.before_read = random_states(training.device) if training.guard.undoes else None
    batches = [next(training.batches) for _ in share.counts]
    if training.config.plan.capture != "off" and training.device.type == "cuda":
        # A graph's inputs are copied from device to device; a pass by itself brings its own batch.
        batches = to_device(batches, training.device)
    weights = tuple(share.weight(count, num_ranks=sharing.num_ranks) for count in share.counts)
    return StepPasses(weights=weights, batches=batches, num_samples=share.num_samples)


def _reported(update: Update) -> tuple[bool, str | None]:
    """Whether the last step was replayed, and what was decided of capturing; where steps may be captured."""
    take_report = getattr(update, "take_report", None)
    return (False, None) if take_report is None else take_report()


def update(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
    """All passes and the optimizer's step: this rank's part of the loss, times the number of ranks; and the norm."""
    training.guard.begin()
    total = run_passes(training, weights, batches, guard=training.guard)
    training.guard.agree()
    grad_norm = None
    options = training.config.train
    # Under fp16 the scaler skips by itself.
    may_skip = options.nonfinite == "skip" and not training.scaler.is_enabled()
    if options.clip_norm or may_skip:
        training.scaler.unscale_(training.optimizer)
        grad_norm = clip_grad_norm_(training.model, options.clip_norm or math.inf)
    # The norm is the same on every rank. On a GPU it is waited for in each step only to skip.
    may_stop = options.nonfinite == "stop" and training.device.type == "cpu" and not training.scaler.is_enabled()
    if grad_norm is None or not (may_skip or may_stop) or bool(grad_norm.isfinite()):
        training.scaler.step(training.optimizer)
    elif training.nonfinite is None:
        training.nonfinite = _find_first_nonfinite(training, weights, batches)
    training.scaler.update()
    training.optimizer.zero_grad()
    return total, grad_norm


def run_passes(training: Training, weights: tuple[float, ...], batches: list[Any], *, guard: NoGuard) -> Tensor:
    """Forward and backward of each pass: this rank's part of the loss, times the number of ranks."""
    total = torch.zeros((), device=training.device)
    for number, (weight, batch) in enumerate(zip(weights, batches, strict=True)):
        with accumulate(training.model, enabled=number + 1 < len(batches)):
            loss = guard.run(partial(_pass, training, weight, batch))
        if loss is not None:
            total += loss
    return total


def _pass(training: Training, weight: float, batch: Any) -> Tensor:
    loss = training.task.loss(training.model, to_device(batch, training.device)) * weight
    training.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _find_first_nonfinite(training: Training, weights: tuple[float, ...], batches: list[Any]) -> FirstNonFinite:
    # The gradients that are there would be added to.
    training.optimizer.zero_grad()
    return find_first_nonfinite(
        training.task.model,
        training.optimizer,
        step=training.step,
        batches=batches,
        device=training.device,
        run_again=lambda: run_passes(training, weights, batches, guard=NoGuard()),
    )


def evaluate_now(training: Training) -> dict[str, float]:
    """The task's metrics on what was kept back."""
    task, config = training.task, training.config
    assert task.evaluate is not None
    assert task.eval_dataset is not None
    count = min(len(cast(Any, task.eval_dataset)), config.train.eval_samples or 2**62)
    training.tell(f"step {training.step}/{training.num_steps}  evaluating on {count:,} samples …")
    return evaluate(
        training.model,
        task.evaluate,
        task.eval_dataset,
        sharing=training.sharing,
        device=training.device,
        workers=config.data.workers,
        num_samples=config.train.eval_samples,
    )


def save(training: Training, checkpoints: "Checkpoints") -> None:
    """After the step's metrics are on disk: a step that is in a checkpoint is not redone."""
    checkpoints.save(
        training.model,
        training.optimizer,
        step=training.step,
        progress=training.progress(),
        own=random_states(training.device),
        finite_only=training.config.train.nonfinite != "warn",
    )


def _evaluates(training: Training, *, last: bool) -> bool:
    every = training.config.train.eval_every
    if every is None:
        return last and training.task.evaluate is not None and training.task.eval_dataset is not None
    return every > 0 and (last or _due(training.step, every))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
