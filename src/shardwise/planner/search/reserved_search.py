"""The best dial that fits by the model of the caching allocator, which needs more than the tensors."""

from dataclasses import replace

from shardwise.planner.search.dial import Choice, Dial
from shardwise.planner.search.solver import Solver

WORTH_A_LOOK = 1.02
"""A dial is only tried again if it is this much faster at the batch that its tensors allow."""

# How often the search is repeated with a lower limit.
_REPEATS = 8
# Dials that are tried again with the full limit: uniform ones (one per choice), and others.
_LOOKS = {True: 6, False: 3}


def best_reserved(solver: Solver, *, quick: bool) -> Dial | None:
    """Return the best dial that also fits by the allocator's model: until then, repeat with a lower limit."""
    limit, costs = solver.limit, solver.costs
    dial = solver.best()
    if quick or dial is None:
        return dial
    for _ in range(_REPEATS):
        needed = costs.device_bytes(dial, limit_bytes=limit)
        if needed <= limit:
            return _second_look(solver, found=dial, limit=limit)
        solver.limit = costs.tensor_bytes(dial) - (needed - limit)
        dial = solver.best()
        if dial is None:
            break
    return _second_look(solver, found=None, limit=limit)


def _second_look(solver: Solver, *, found: Dial | None, limit: float) -> Dial | None:
    """Try dials again that the lower limit excluded, but for which the allocator needs less.

    As long as nothing is found, every uniform dial is tried: those cause the least fragmentation.
    """
    if found is not None and (solver.limit == limit or solver.goal == "memory"):
        return found
    costs = solver.costs
    tried: dict[bool, set[Choice | Dial]] = {True: set(), False: set()}
    for dial in sorted(costs.timed(), key=lambda dial: -costs.speed(dial)):
        is_uniform = len(set(dial.choices)) == 1
        own, structure = tried[is_uniform], dial.choices[0] if is_uniform else replace(dial, batch=1)
        if found is not None and costs.speed(dial) < WORTH_A_LOOK * costs.speed(found):
            break
        if (len(own) >= _LOOKS[is_uniform] and (found is not None or not is_uniform)) or structure in own:
            continue
        if costs.tensor_bytes(dial) <= limit and costs.fits_host(dial) and solver.is_better(dial, found):
            own.add(structure)
            smaller = _shrunk(dial, solver=solver, limit=limit)
            if smaller is not None and solver.is_better(smaller, found):
                found = smaller
    return found


def _shrunk(dial: Dial, *, solver: Solver, limit: float) -> Dial | None:
    """Return the dial with about the largest batch that fits by the allocator's model, or None."""
    costs = solver.costs
    needed = costs.device_bytes(dial, limit_bytes=limit)
    if needed <= limit:
        return dial
    if not solver.batches.is_free:
        return None
    low, high = 0, dial.batch
    half = replace(dial, batch=max(1, high // 2))
    per_sample = (costs.tensor_bytes(dial) - costs.tensor_bytes(half)) / max(1, high - half.batch)
    guess = high - (needed - limit) / per_sample if per_sample > 0 else 0
    while high - low > max(1, high // 50):
        batch = round(guess) if low + 0.5 < guess < high - 0.5 else (low + high) // 2
        guess = 0
        fits = costs.device_bytes(replace(dial, batch=batch), limit_bytes=limit) <= limit
        low, high = (batch, high) if fits else (low, batch)
    return replace(dial, batch=low) if low else None
