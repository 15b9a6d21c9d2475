"""The learning rate as a function of the step alone, so that checkpoints need not hold it. No torch here."""

import math

from shardwise.training.config.config_sections import ScheduleSection


def lr_at(step: int, *, schedule: ScheduleSection, lr: float, num_steps: int) -> float:
    """Return the learning rate of step 1, 2, …, num_steps.

    In the first w = warmup_steps it rises by lr/w per step and reaches lr in step w. After that, with the share
    p = (step - 1 - w) / (num_steps - w) of the rest done before the step, and f = final_ratio:

        constant   lr
        linear     lr · (f + (1 - f) (1 - p))
        cosine     lr · (f + (1 - f) (1 + cos πp) / 2)

    p stays below 1, so that no step has a rate of lr · f = 0.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    part = min(1.0, (step - 1 - warmup) / max(1, num_steps - warmup))
    left = {"constant": 1.0, "linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}[schedule.name]
    final = 1.0 if schedule.name == "constant" else schedule.final_ratio
    return lr * (final + (1 - final) * left)
