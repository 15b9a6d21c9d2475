"""The days, GPU-hours and money of a training at the speed of a plan. No torch."""

from dataclasses import dataclass

from shardwise.base.errors import InvalidPlan
from shardwise.planner.search.candidates import Candidate

_DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """`cost` in the currency of the price, if there is one. `global_batch` in samples; `mfu` of the device's peak."""

    candidate: Candidate
    tokens_per_day: float
    days: float
    gpu_hours: float
    cost: float | None
    mfu: float | None
    global_batch: int
    global_batch_tokens: int


def training_cost(candidate: Candidate, *, num_tokens: float, price_per_gpu_hour: float | None) -> TrainingCost | None:
    """Return the cost of a training, without failures and evaluations; None if the plan's time is not predicted."""
    time = candidate.time
    if candidate.seq is None:
        raise InvalidPlan(
            "--tokens: this model's samples are not counted in tokens; a python: task says how many a sample has by "
            "Task(tokens_per_sample=…)"
        )
    if time is None:
        return None
    tokens_per_day = time.samples_per_s * candidate.seq * _DAY_SECONDS
    days = num_tokens / tokens_per_day
    gpu_hours = days * 24 * candidate.cluster.num_ranks
    return TrainingCost(
        candidate=candidate,
        tokens_per_day=tokens_per_day,
        days=days,
        gpu_hours=gpu_hours,
        cost=gpu_hours * price_per_gpu_hour if price_per_gpu_hour is not None else None,
        mfu=time.mfu,
        global_batch=candidate.global_batch,
        global_batch_tokens=candidate.global_batch * candidate.seq,
    )
