"""Each strategy's peak without activations, for the error of a job that ran out of memory: the model is not traced."""

from dataclasses import replace
from typing import Any

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.memory.peak import estimate
from shardwise.program.spec import ModelSpec

# The rules for torch's and train's optimizers: (fused, one tensor at a time, foreach).
_RULES = {
    "Adam": ("adam-fused", "adamw-loop", "adamw-foreach"),
    "AdamW": ("adamw-fused", "adamw-loop", "adamw-foreach"),
    "MuonWithAdamW": ("muon-fused", "muon-loop", "muon-foreach"),
}


def states_peaks(spec: ModelSpec, *, plan: Plan, num_ranks: int, optimizer: Any, device: str) -> dict[str, int]:
    """Return the bytes by strategy; nothing if there is no rule for this optimizer of torch."""
    rule = _rule(optimizer, device=device)
    if rule is None:
        return {}
    spec = replace(spec, traces=())
    return {
        strategy: estimate(
            spec,
            plan=replace(plan.under(strategy), offload_states=False),
            num_ranks=num_ranks,
            batch=1,
            optimizer=rule,
            device=device,
            quick=True,
        ).allocated_bytes
        for strategy in STRATEGIES
    }


def _rule(optimizer: Any, *, device: str) -> str | None:
    if optimizer is None:
        return None
    name, options = type(optimizer).__name__, {**optimizer.defaults, **optimizer.param_groups[-1]}
    if name in _RULES:
        fused, one_by_one, at_once = _RULES[name]
        return fused if options.get("fused") else one_by_one if device == "cpu" else at_once
    return ("sgd" if options.get("momentum") else "sgd-plain") if name == "SGD" else None
