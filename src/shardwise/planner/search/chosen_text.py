"""The solver's choice in one sentence. No torch."""

from collections.abc import Callable, Sequence

from shardwise.plan import Plan
from shardwise.plan.placement import strategy_of
from shardwise.program.spec import ROOT


def chosen_text(plan: Plan, *, names: Sequence[str]) -> str:
    """Describe a plan's choices for the units of these names: `fsdp; recompute full in blocks.0 to blocks.22 …`."""
    parts = [_split(names, of=lambda name: strategy_of(plan.placement(name)), word="") + plan.across_text]
    blocks = [name for name in names if name != ROOT]
    if any(plan.recompute_of(name) != "none" for name in blocks):
        parts.append(_split(blocks, of=plan.recompute_of, word="recompute "))
    else:
        parts.append("nothing recomputed")
    passes = f" × {plan.accumulate} passes" if plan.accumulate > 1 else ""
    reduced = ", each pass reduced" if plan.accumulate > 1 and plan.accumulate_reduced else ""
    parts.append(f"micro-batch {plan.micro_batch}{passes}{reduced}")
    parts.append(f"prefetch {plan.prefetch}")
    parts += [f"{pattern} in tiles of {tokens:,} tokens" for pattern, tokens in plan.tile.items()]
    if plan.compiler != "none":
        parts.append(f"units compiled by {plan.compiler}")
    places = {"activations": plan.has_activations_on_host, "states": plan.has_states_on_host}
    for what, is_on_host in places.items():
        chosen = [name for name in names if is_on_host(name)]
        if len(chosen) >= len(blocks):
            parts.append(f"{what} in host memory")
        elif chosen:
            parts.append(f"{what} of {_named(chosen, order=names)} in host memory")
    if plan.offload_states and plan.offload_update == "host":
        parts.append("updated by the CPU")
    if plan.updates_in_backward:
        parts.append("updated inside backward")
    return "; ".join(parts)


def _split(names: Sequence[str], *, of: Callable[[str], str], word: str) -> str:
    """Describe value by value; the most common one comes last, without names."""
    values = {value: [name for name in names if of(name) == value] for value in dict.fromkeys(map(of, names))}
    if len(values) == 1:
        return f"{word}{next(iter(values))} in all units" if word else f"{next(iter(values))} for all units"
    *few, most = sorted(values, key=lambda value: len(values[value]))
    joint = "in" if word else "for"
    named = [f"{word}{value} {joint} {_named(values[value], order=names)}" for value in few]
    return ", ".join([*named, f"{word}{most} {joint} the other {len(values[most])}"])


def _named(chosen: Sequence[str], *, order: Sequence[str]) -> str:
    """Describe one or two units by name, consecutive ones by their ends, others by their number."""
    at = [order.index(name) for name in chosen]
    if len(chosen) <= 2:
        return " and ".join(chosen)
    if at == list(range(at[0], at[-1] + 1)):
        return f"{chosen[0]} to {chosen[-1]}"
    return f"{len(chosen)} units"
