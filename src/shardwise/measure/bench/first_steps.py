"""Takes the first steps of a run, by which trainings are compared, and observes the last of them."""

import math
import time
from contextlib import nullcontext
from dataclasses import replace

from shardwise.measure.bench.gradients import GradientNorms, parts_of, shows_gradients
from shardwise.measure.bench.observer import Observer, stepped_dtypes
from shardwise.measure.bench.run_files import BenchRun, Found
from shardwise.measure.bench.subject import BenchTraining
from shardwise.training.loop.metrics import Taken, Window

NUM_STEPS = 3
"""The last is observed: by then buckets and optimizer states exist, and nothing is replayed yet."""


def take_first_steps(found: Found, subject: BenchTraining, *, run: BenchRun) -> Found:
    """Take the first steps, and add what they show. A silent run is only timed: it lacks the gradients of others."""
    if run.silent:
        (step, seconds), *_ = [_timed(subject, run=run) for _ in range(NUM_STEPS)]
        return replace(found, first_step_seconds=seconds, step_tokens=step.num_tokens)
    training = subject.training
    names = subject.trained_names if shows_gradients(training.model) else []
    window = Window(device=training.device, num_ranks=training.sharing.num_ranks)
    gradients = GradientNorms(parts_of(training.model, names=names), names=names)
    observer = Observer()
    norms: list[dict[str, float]] = []
    taken: list[tuple[Taken, float]] = []
    with stepped_dtypes(training.optimizer) as dtypes:
        for number in range(1, NUM_STEPS + 1):
            observing = observer if run.detailed and number == NUM_STEPS else nullcontext()
            with gradients.seen_by(training.optimizer), observing:
                taken.append(_timed(subject, run=run))
            window.add(taken[-1][0])
            norms.append(gradients.norms(device=training.device))
    steps = window.read()
    observed = observer.observed
    seen_dtypes = {"compute": observed.computed_in, **dtypes} if run.detailed else {}
    return replace(
        found,
        first_step_seconds=taken[0][1],
        step_tokens=taken[0][0].num_tokens,
        losses=tuple(step.loss for step in steps),
        # Clipping computes the norm; where nothing is clipped, it comes from those of the parameters.
        grad_norms=tuple(
            math.hypot(*by_name.values()) if step.grad_norm is None else step.grad_norm
            for step, by_name in zip(steps, norms, strict=True)
        ),
        param_norms=norms[0],
        dtypes={name: tuple(sorted(seen)) for name, seen in seen_dtypes.items()},
        calls=dict(observed.calls),
        sent_bytes=round(observed.sent_bytes) if run.detailed else None,
    )


def _timed(subject: BenchTraining, *, run: BenchRun) -> tuple[Taken, float]:
    """Take a step; return it with the time at its end, in seconds since the processes were started."""
    taken = subject.step()
    subject.settle()
    return taken, time.time() - run.started
