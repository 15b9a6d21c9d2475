"""Lines about a resumed run whose steps have other samples, or another learning rate. No torch here."""

from shardwise.training.config.config import TrainConfig
from shardwise.training.config.learning_rate import lr_at


def batch_line(before: int | None, *, now: int, num_ranks: int) -> str | None:
    """Return a line if a step has another number of samples than before, with the settings that keep it."""
    if before is None or before == now:
        return None
    if before % num_ranks == 0:
        keeps = (
            f"plan.micro_batch × plan.accumulate = {before // num_ranks} keeps {before}, and so does "
            f"auto.global_batch = {before} with plan.strategy = 'auto', on any number of ranks that divides it"
        )
    else:
        fitting = [count for count in range(1, before + 1) if before % count == 0]
        below, above = max(c for c in fitting if c < num_ranks), min((c for c in fitting if c > num_ranks), default=0)
        ranks = " or ".join(str(count) for count in (below, above) if count)
        keeps = f"{before} cannot be divided by {num_ranks} ranks: --ranks {ranks} keeps it"
    return f"samples per step: {before} → {now}, with the same learning rate; {keeps}"


def rate_line(before: TrainConfig, *, now: TrainConfig, step: int, num_steps: int) -> str | None:
    """Return a line if the next step's learning rate is not the one it would have had, with what keeps it."""
    if before.train.steps is None:
        # The number of steps followed from the data and the ranks; the schedule keeps its form.
        return None
    has_ended = step >= before.train.steps
    was, rate = (
        lr_at(min(step + 1, count), schedule=config.schedule, lr=config.optimizer.lr, num_steps=count)
        for config, count in ((before, before.train.steps), (now, num_steps))
    )
    if abs(was - rate) <= 1e-9 * max(was, rate):
        return None
    if has_ended:
        return f"the schedule of {before.train.steps} steps had ended: learning rate {was:.2e} → {rate:.2e}"
    changed = {
        "train.steps": (before.train.steps, now.train.steps),
        "optimizer.lr": (before.optimizer.lr, now.optimizer.lr),
        **{
            f"schedule.{name}": (getattr(before.schedule, name), getattr(now.schedule, name))
            for name in ("name", "warmup_steps", "final_ratio")
        },
    }
    keep = " ".join(f"--set {name}={value}" for name, (value, new) in changed.items() if value != new)
    return f"learning rate of step {step + 1}: {was:.2e} → {rate:.2e}; {keep} keeps the schedule"
