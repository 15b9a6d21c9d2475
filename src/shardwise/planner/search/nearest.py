"""The search for a plan that needs less memory than one that ran out, on the same devices. No torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.patterns import is_among, short_patterns
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, SpecFor, cost
from shardwise.planner.search.dial import turned_units
from shardwise.planner.search.request import AutoRequest, NoPlanFits
from shardwise.program.spec import ROOT, ModelSpec

# If a plan failed although it should fit, the new one may need at most this share of it.
_LESS = 0.9


def find_smaller(spec_for: SpecFor, *, plan: Plan, request: AutoRequest) -> tuple[Candidate, Candidate | None]:
    """Return the plan that ran out of memory, and one that needs less; None: there is none.

    An `auto` plan is solved again with a tenth less memory. Of any other plan, and where nothing is solved, the nearest
    change that fits is taken. A step keeps its samples and its precision.
    """
    before = cost(spec_for(plan), plan=plan, cluster=request.cluster, optimizer=request.optimizer)
    if request.plan.is_auto:
        less = replace(request, budget_bytes=int(_LESS * before.memory.device_bytes))
        with suppress(NoPlanFits):
            return before, solve_plan(spec_for, request=less).candidate
    found = nearest_fit(spec_for, plan=plan, cluster=request.cluster, optimizer=request.optimizer)[1]
    # Changes of the precision come last.
    return before, found if found is not None and found.plan.precision == plan.precision else None


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

    def costed(changed: Plan) -> Candidate:
        return cost(spec_for(changed), plan=changed, cluster=cluster, optimizer=optimizer)

    def fits(found: Candidate) -> bool:
        return found.fits in ("yes", "unknown") and found.memory.device_bytes <= most

    for changed in changes(plan):
        if limits.why_not(changed) is not None:
            continue
        if needs_whole_matrices(optimizer) and (changed.offload_states or limits.why_not_call("muon", changed)):
            # Matrices that a rank owns stay on the device, and not every engine has owners.
            continue
        if fits(costed(changed)):
            names = host_units(spec_for(changed))
            return this, costed(fewest_on_host(changed, before=plan, names=names, fits=lambda one: fits(costed(one))))
    return this, None


def changes(plan: Plan) -> Iterator[Plan]:
    """Yield plans that need less memory: single changes before several, and changes that keep all results first.

    A smaller micro-batch comes with more passes, so that a step has as many samples.
    """
    every = strategies_of(plan.engine)
    sharded = [plan.under(name) for name in every[every.index(plan.strategy) + 1 :]]
    yield from (*sharded, *_recomputed(plan), *_smaller(plan))
    most_sharded = [plan, *sharded][-1]
    least = [most_sharded, *_recomputed(most_sharded)][-1]
    yield from (more for one in sharded for more in _recomputed(one))
    yield from (*_smaller(most_sharded), *_smaller(least))
    largest_to_least = (plan, most_sharded, least, *_smaller(least))
    if LIMITS[plan.engine].has("offload_states"):
        movable = [] if plan.owned else list(largest_to_least)
        yield from (replace(one, offload_states=True) for one in movable)
        yield from (replace(one, offload_activations=True) for one in largest_to_least)
        yield from (replace(one, offload_states=True, offload_activations=True) for one in movable)
        if not plan.updates_in_backward:
            yield from (replace(one, offload_states=True, offload_update="host") for one in movable)
    if plan.precision == "fp32":
        yield from (replace(one, precision="bf16") for one in largest_to_least)


def host_units(spec: ModelSpec) -> tuple[str, ...]:
    """Return the units that may live in host memory: the root, and the others in the order of calls."""
    return (ROOT, *turned_units(spec))


def fewest_on_host(plan: Plan, *, before: Plan, names: Sequence[str], fits: Callable[[Plan], bool]) -> Plan:
    """Return a plan that fits with as few units in host memory as possible. `plan` fits, and has all units there.

    Units that `before` has there stay. The states of those that forward uses last come first: their updates have the
    most time. So have the copies of activations that backward needs last; the root keeps its own.
    """
    for setting, in_order in (("offload_states", names[::-1]), ("offload_activations", names[1:])):
        chosen = getattr(before, setting)
        if getattr(plan, setting) is not True or chosen is True:
            continue
        there = [name for name in in_order if is_among(name, chosen)]
        ordered = [*there, *(name for name in in_order if name not in there)]
        too_few, enough = len(there), len(ordered)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if fits(_on_host(plan, setting, ordered[:middle], among=in_order)):
                enough = middle
            else:
                too_few = middle
        plan = _on_host(plan, setting, ordered[:enough], among=in_order)
    return plan


def _on_host(plan: Plan, setting: str, chosen: Sequence[str], *, among: Sequence[str]) -> Plan:
    some: dict[str, Any] = {setting: len(chosen) == len(among) or short_patterns(sorted(chosen), among=among)}
    return replace(plan, **some)


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
    if plan.accumulate_reduced or plan.updates_in_backward:
        return smaller
    return [*smaller, *(replace(one, accumulate_reduced=True) for one in smaller)]


def cost_of_change(before: Candidate, found: Candidate) -> str:
    """Describe a change of the plan in a few words: what changes, its memory, its speed if that is predicted."""
    changed = ", ".join(f"{name} = {value!r}" for name, value in changed_settings(found.plan, of=before.plan).items())
    share = found.memory.device_bytes / before.memory.device_bytes
    speed = ""
    if before.time is not None and found.time is not None:
        speed = f" and {found.time.samples_per_s / before.time.samples_per_s:.2f} × the speed"
    return f"{changed} (predicted {share:.2f} × the memory{speed})"


def changed_settings(plan: Plan, *, of: Plan) -> dict[str, object]:
    """Return key → new value of the settings under [plan] that differ."""
    before, after = of.to_dict(), plan.to_dict()
    return {name: value for name, value in after.items() if before.get(name) != value}
