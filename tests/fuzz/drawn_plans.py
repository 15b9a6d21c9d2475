"""Random plans, drawn from the keys of `Plan` itself: a test fails if a key is not listed here."""

from dataclasses import fields
from random import Random
from typing import Any

from torch import nn

from shardwise.engine.plan_change.replan import _FIXED
from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.plan.placement import ACROSS, SHARDED, STRATEGIES, Mesh
from shardwise.program.units import unit_modules

# Keys that are not drawn, with the reason.
LEFT_OUT = {
    "micro_batch": "the planner's",
    "accumulate": "a default of `shardwise train`; here a step says how many passes it has",
    "capture": "auto: units are graphs on a GPU",
    "engine": "the oracle is plain torch",
    "fp8_min_features": "as small as the parts, wherever precision is fp8",
}
# The values that are drawn, by key; the first is the default.
VALUES: dict[str, list[Any]] = {
    "strategy": list(STRATEGIES),
    "units": ["auto", "none", "leaf", "min-params:20", "auto + parts.0", "parts"],
    "accumulate_reduced": [False, True],
    "precision": ["fp32", "bf16", "fp16", "fp8"],
    "reduce_dtype": ["fp32", "bf16"],
    "recompute": ["none", "full", "selective"],
    "offload_activations": [False, True],
    "offload_states": [False, True],
    "offload_update": ["device", "host"],
    "update": ["step", "backward"],
    "prefetch": [1, 0, 3],
    "reduces_in_flight": [1, 2],
    "bucket_bytes": [25 * 2**20, 1, 100],
    "piece_bytes": [None, 100, 1000],
    "dynamic": [False, True],
    "compile": ["none", "aot_eager"],
    "collectives": ["backend", "ring"],
}
# How often a key is drawn, where that is less than usual: compiling takes seconds.
SHARES = {"compile": 0.004, "update": 0.05, "precision": 0.2, "reduce_dtype": 0.2}
_USUAL_SHARE = 0.3
# Keys that change what is computed: results are compared with a ddp job of the same precision, not with one process.
NARROW = ("precision", "reduce_dtype", "keep_fp32", "fp8_recipe", "fp8_min_features", "keep_bf16", "tile")
# Strategies under which states can be offloaded: replicated gradients stay on the device.
_OFFLOADED = {name for name, placement in STRATEGIES.items() if placement.grads is SHARDED}
# Keys whose values depend on the model or the number of ranks.
DRAWN_HERE = (
    *(
        "overrides",
        "recompute_overrides",
        "keep_fp32",
        "keep_bf16",
        "fp8_recipe",
        "owned",
        "mesh",
        "across",
        "uncaptured",
        "tile",
    ),
)
_OWNED = "*.weight"
# The first part is for fp8 where that is drawn, and layers of the root do not multiply in it.
FP8_UNITS = "auto + parts.0"


def unlisted() -> set[str]:
    """Return the keys of a plan that are neither drawn nor left out."""
    return {field.name for field in fields(Plan)} - {*VALUES, *DRAWN_HERE, *LEFT_OUT}


def draw_plan(
    random: Random, *, num_parts: int, num_ranks: int, like: dict[str, Any] | None = None, may_be_narrow: bool = True
) -> dict[str, Any]:
    """Return the keys of a plan. `like`: a plan to which `replan` may change from this one."""
    plan: dict[str, Any] = {"strategy": random.choice(VALUES["strategy"])}
    for name, values in VALUES.items():
        if name != "strategy" and random.random() < SHARES.get(name, _USUAL_SHARE):
            plan[name] = random.choice(values) if name not in SHARES else random.choice(values[1:])
    patterns = [f"parts.{number}" for number in range(num_parts)]
    if random.random() < 0.3:
        plan["overrides"] = {random.choice(["(root)", *patterns]): random.choice(VALUES["strategy"])}
    if random.random() < 0.2:
        plan["recompute_overrides"] = {random.choice(patterns): random.choice(VALUES["recompute"])}
    if random.random() < 0.2:
        replicate = random.choice([number for number in range(1, num_ranks + 1) if num_ranks % number == 0])
        plan["mesh"] = [replicate, num_ranks // replicate]
    if random.random() < 0.1 and "offload_states" not in plan:
        plan["owned"] = [_OWNED]
    for name in ("offload_states", "offload_activations"):
        if plan.get(name) and random.random() < 0.25:
            plan[name] = [random.choice(["(root)", *patterns])]
    if random.random() < 0.1:
        plan["uncaptured"] = [random.choice(patterns)]
    if random.random() < 0.05:
        plan["tile"] = {random.choice([f"{random.choice(patterns)}.up", "head"]): random.choice([1, 2])}
    if "precision" in plan and random.random() < 0.5:
        plan["keep_fp32"] = [random.choice(["first", *patterns])]
    if plan.get("precision") == "fp8":
        plan |= _draw_fp8(random)
        if plan.get("units") not in ("leaf", "min-params:20"):
            plan["units"] = FP8_UNITS
        if plan.get("keep_fp32") == ["parts.0"]:
            del plan["keep_fp32"]
    if any(name in plan for name in NARROW):
        # Compiled code rounds differently, and in a narrow dtype no bound is small enough.
        plan.pop("compile", None)
    if not may_be_narrow:
        plan = {name: value for name, value in plan.items() if name not in NARROW}
    if like is not None:
        # The ranks that own parameters are chosen when a model is prepared.
        fixed = {*_FIXED, "owned"}
        plan = {name: value for name, value in plan.items() if name not in fixed}
        plan |= {name: value for name, value in like.items() if name in fixed}
    if not {plan["strategy"], *plan.get("overrides", {}).values()} <= _OFFLOADED or "owned" in plan:
        plan.pop("offload_states", None)
    return plan | draw_across(random, plan)


def draw_across(random: Random, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the strategy across the replicate axis of a mesh, where there is something to shard over it."""
    is_sharded = _shards_params([plan["strategy"], *plan.get("overrides", {}).values()])
    if "mesh" not in plan or plan["mesh"][0] == 1 or not is_sharded or "owned" in plan or "offload_states" in plan:
        return {}
    return {"across": random.choice(ACROSS)}


def _shards_params(rows: list[str]) -> bool:
    return any(STRATEGIES[row].params is SHARDED for row in rows)


def _draw_fp8(random: Random) -> dict[str, Any]:
    """Return the keys that go with fp8; the model has a part for it (compositions.py)."""
    found: dict[str, Any] = {"fp8_min_features": 16}
    if random.random() < 0.4:
        found["fp8_recipe"] = "rowwise"
    if random.random() < 0.2:
        found["keep_bf16"] = ["parts.*.down"]
    return found


def is_narrow(plan: dict[str, Any]) -> bool:
    return any(name in plan for name in NARROW)


def as_plan(keys: dict[str, Any], *, model: nn.Module) -> Plan:
    """Return the plan for a model, without patterns that match none of its units: those are refused."""
    found = dict(keys)
    if keys.get("units") == "parts":
        found["units"] = " + ".join(["auto", *(f"parts.{number}" for number in range(len(model.parts)))])
    names = list(unit_modules(model, policy=found.get("units", "auto")))
    for key in ("overrides", "recompute_overrides"):
        given = keys.get(key, {})
        found[key] = {name: value for name, value in given.items() if name not in unmatched(given, names)}
    if "uncaptured" in keys:
        found["uncaptured"] = [name for name in keys["uncaptured"] if name not in unmatched([name], names)]
    if "tile" in keys:
        modules = [name for name, _ in model.named_modules()]
        found["tile"] = {name: value for name, value in keys["tile"].items() if name in modules}
    if "mesh" in keys:
        found["mesh"] = Mesh(replicate=keys["mesh"][0], shard=keys["mesh"][1])
    if "mesh" not in keys or not _shards_params([keys["strategy"], *found["overrides"].values()]):
        found.pop("across", None)
    return Plan(**found)


def features(keys: dict[str, Any]) -> set[str]:
    """Return the features of a plan: each key with its value; patterns count by the key alone, or as true."""
    plain = {name: True if isinstance(value, list) else value for name, value in keys.items() if name not in LEFT_OUT}
    return {name if name in DRAWN_HERE else f"{name} {value}" for name, value in plain.items()}


def all_features() -> set[str]:
    return {*DRAWN_HERE, *(f"{name} {value}" for name, values in VALUES.items() for value in values)} - {
        f"{name} {VALUES[name][0]}" for name in SHARES
    }
