"""The training loop on one rank: step after step, with metrics, evaluations and checkpoints in between."""

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from shardwise.base.vocabulary.quantities import seconds_text
from shardwise.engine.random_states import random_states
from shardwise.engines import find_engine
from shardwise.training.config.learning_rate import lr_at
from shardwise.training.launch.failure import during
from shardwise.training.loop.batches import tokens_per_sample
from shardwise.training.loop.compile_clock import CompileClock
from shardwise.training.loop.evaluation import evaluate
from shardwise.training.loop.metrics import MetricsRecorder, StepMetrics, Taken, Window
from shardwise.training.loop.nonfinite import NonFinite, check_finite
from shardwise.training.loop.optimizers import set_lr
from shardwise.training.loop.preemption import Preemption
from shardwise.training.loop.training_state import Training
from shardwise.training.loop.update import next_passes

if TYPE_CHECKING:
    from shardwise.state.checkpoint.checkpoints import Checkpoints


def run_steps(
    training: Training, *, checkpoints: "Checkpoints", request: Preemption, recorder: MetricsRecorder
) -> bool:
    """Train to the last step, or until the ranks agree to stop; return whether they did. Ends on a checkpoint."""
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
        keeps = training.recovery is not None and training.recovery.due(training.step) and not (stop or last)
        if evaluates or saves or stops or keeps or _due(training.step, options.log_every):
            steps = window.read()
            _check_finite(training, steps, window=window, recorder=recorder)
            if evaluates:
                steps[-1] = replace(steps[-1], evaluation=_evaluate(training))
            if training.recovery is not None:
                steps = [replace(step, host_bytes=training.recovery.host_bytes) for step in steps]
            # Before the checkpoint: a step that is in one is not redone, so its metrics must be on disk.
            recorder.record(steps)
            if saves:
                _save(training, checkpoints)
            if keeps and training.recovery is not None:
                training.recovery.take(training.model, training.optimizer, step=training.step, **_progress(training))
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
            warns=training.sharing.rank == 0,
        )
    except NonFinite:
        # The user will look at its metrics.
        recorder.record(steps)
        raise
    training.nonfinite = None


def take_step(training: Training) -> Taken:
    """Take one optimizer step. It does not wait for the device, except with fp16 or where the norm is checked."""
    training.step += 1
    schedule, lr = training.config.schedule, training.config.optimizer.lr
    lr = lr_at(training.step, schedule=schedule, lr=lr, num_steps=training.num_steps)
    set_lr(training.optimizer, lr)
    passes = next_passes(training)
    before = _replayed_calls(training)
    with CompileClock() as clock:
        loss, grad_norm = training.update(training, passes.weights, passes.batches)
    num_calls, num_replayed = (now - then for now, then in zip(_replayed_calls(training), before, strict=True))
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
        replayed_share=num_replayed / num_calls if num_calls else None,
    )


def _replayed_calls(training: Training) -> tuple[int, int]:
    engine = find_engine(training.model)
    return (0, 0) if engine is None else engine.replayed_calls()


def _evaluate(training: Training) -> dict[str, float]:
    """Return the task's metrics on its evaluation samples."""
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


def _save(training: Training, checkpoints: "Checkpoints") -> None:
    checkpoints.save(
        training.model,
        training.optimizer,
        step=training.step,
        **_progress(training),
        finite_only=training.config.train.nonfinite != "warn",
    )


def _progress(training: Training) -> dict[str, Any]:
    # The same on every rank; the learning rate is a function of the step.
    progress = {"sampler": training.sampler.state_dict(), "scaler": training.scaler.state_dict()}
    return {"progress": progress, "own": random_states(training.device)}


def _evaluates(training: Training, *, last: bool) -> bool:
    every = training.config.train.eval_every
    if every is None:
        return last and training.task.evaluate is not None and training.task.eval_dataset is not None
    return every > 0 and (last or _due(training.step, every))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
