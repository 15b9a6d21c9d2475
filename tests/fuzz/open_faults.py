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
    return any({plan["strategy"], *plan.get("overrides", {}).values()} & _SHARDED for plan in case.plans())


def _branches(case: Case) -> bool:
    return any(part.uses == "sometimes" for part in case.parts)


def _in_one_backward(case: Case) -> bool:
    return any(event.kind == "together" and event.settings["how"] == "critic" for event in case.events)


OPEN_FAULTS: dict[str, Callable[[Case], bool]] = {
    # As after any error that one rank alone raises and catches. In a job its process ends, and the others with it.
    "a layer is refused on the rank that comes to it first, and the others wait in a unit that it did not call": (
        lambda case: _branches(case) and _shards(case) and any(part.kind == "clamped" for part in case.parts)
    ),
    # Each model keeps to an order of its own, and the order between them is that of their backwards: docs/engine.md.
    "two models in one backward, and ranks call different parts of one": (
        lambda case: _in_one_backward(case) and _branches(case)
    ),
}
