"""The smallest change of a plan that ran out of memory so that it fits on the same devices. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.candidates import Candidate, SpecFor, cost

# If a plan failed although it should fit, the new one may need at most this share of it.
_LESS = 0.9


def nearest_fit(
    spec_for: SpecFor, *, plan: Plan, cluster: Cluster, optimizer: str
) -> tuple[Candidate, Candidate | None]:
    """Return the plan itself, and the first of its `changes` that fits, or None.

    A plan that should have fitted shows that less memory is free than the device has. Then a plan fits if it needs a
    tenth less.
    """
    this = cost(spec_for(plan), plan=plan, cluster=cluster, optimizer=optimizer)
    most = _LESS * this.memory.device_bytes if this.fits in ("yes", "unknown") else inf
    limits = LIMITS[plan.engine]
    for changed in changes(plan):
        if limits.why_not(changed) is not None:
            continue
        if needs_whole_matrices(optimizer) and (changed.offload_states or limits.why_not_call("muon", changed)):
            # Matrices that a rank owns stay on the device, and not every engine has owners.
            continue
        found = cost(spec_for(changed), plan=changed, cluster=cluster, optimizer=optimizer)
        if found.fits in ("yes", "unknown") and found.memory.device_bytes <= most:
            return this, found
    return this, None


def changes(plan: Plan) -> Iterator[Plan]:
    """Yield plans that need less memory: single changes before several, and changes that keep all results first.

    A smaller micro-batch comes with more passes, so that a step has as many samples.
    """
    every = strategies_of(plan.engine)
    sharded = [replace(plan, strategy=name) for name in every[every.index(plan.strategy) + 1 :]]
    yield from (*sharded, *_recomputed(plan), *_smaller(plan))
    most_sharded = [plan, *sharded][-1]
    least = [most_sharded, *_recomputed(most_sharded)][-1]
    yield from (more for one in sharded for more in _recomputed(one))
    yield from (*_smaller(most_sharded), *_smaller(least))
    largest_to_least = (plan, most_sharded, least, *_smaller(least))
    if LIMITS[plan.engine].has("offload_states"):
        yield from (replace(one, offload_activations=True) for one in largest_to_least)
        movable = [one for one in largest_to_least if not (one.captures or one.owned or one.updates_in_backward)]
        for update in ("device", "host"):
            yield from (replace(one, offload_states=True, offload_update=update) for one in movable)
    if plan.precision == "fp32":
        yield from (replace(one, precision="bf16") for one in largest_to_least)


def _recomputed(plan: Plan) -> list[Plan]:
    """Return the plan with the recompute modes that save less."""
    ways = ("none", "selective", "full")
    return [replace(plan, recompute=way) for way in ways[ways.index(plan.recompute) + 1 :]]


def _smaller(plan: Plan) -> list[Plan]:
    """Return plans with 1/2, 1/4 … of the micro-batch, down to 1; then the same with gradients reduced in each pass."""
    assert plan.micro_batch is not None
    halves = [2**power for power in range(1, plan.micro_batch.bit_length())]
    smaller = [
        replace(plan, micro_batch=plan.micro_batch // times, accumulate=plan.accumulate * times)
        for times in dict.fromkeys((*halves, plan.micro_batch))
        if times > 1 and plan.micro_batch % times == 0
    ]
    return [*smaller, *(replace(one, accumulate_reduced=True) for one in smaller if not plan.accumulate_reduced)]


def changed_settings(plan: Plan, *, of: Plan) -> dict[str, object]:
    """Return key → new value of the settings under [plan] that differ."""
    before, after = of.to_dict(), plan.to_dict()
    return {name: value for name, value in after.items() if before.get(name) != value}
