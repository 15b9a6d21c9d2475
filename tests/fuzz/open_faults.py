"""Compositions that are known to fail and are not mended yet. They are left out, and counted, so that others are found.

A fault goes from here when it is mended. `make fuzz ARGS=--open` tries them as well.
"""

from collections.abc import Callable

from compositions import Case

from shardwise.plan.placement import SHARDED, STRATEGIES

_SHARDED = {name for name, placement in STRATEGIES.items() if placement.params is SHARDED}


def why_left_out(case: Case) -> str:
    """Return which open fault a case may run into; "" if none."""
    return next((fault for fault, concerns in OPEN_FAULTS.items() if concerns(case)), "")


def _shards(case: Case) -> bool:
    """Return whether parameters are sharded at any time."""
    plans = [case.plan, *(event.settings["plan"] for event in case.events if "plan" in event.settings)]
    return any({plan["strategy"], *plan.get("overrides", {}).values()} & _SHARDED for plan in plans)


def _branches(case: Case) -> bool:
    return any(part.uses == "sometimes" for part in case.parts)


def _has(case: Case, *kinds: str) -> bool:
    return any(event.kind in kinds for event in case.events)


def _two_forwards(case: Case) -> bool:
    return any(event.settings.get("forwards", 1) > 1 for event in case.events)


OPEN_FAULTS: dict[str, Callable[[Case], bool]] = {
    "ranks call different units in two forwards before a backward, and parameters are sharded: a hang": (
        lambda case: _branches(case) and _shards(case) and _two_forwards(case)
    ),
    "ranks call different units in a forward without a backward, and parameters are sharded: a hang": (
        lambda case: _branches(case) and _shards(case) and _has(case, "drop a forward", "evaluate", "start average")
    ),
}
