"""The moving parts of a case: of two equally fast cases, the one with fewer is simpler.

An engine does not count as a part, since every case has one.
"""

from shardwise.bench.case_result import CaseResult
from shardwise.plan.placement import AUTO, SHARDED, STRATEGIES

_OPTIM, _GRADS, _PARAMS = "sharded optimizer state", "sharded gradients", "sharded parameters"
_REGATHER, _PER_UNIT = "second gather", "plan per unit"
_GRAPH, _COMPILER = "CUDA graph", "compiler"
_MODES = {"captured": (_GRAPH,), "compiled": (_GRAPH, _COMPILER)}


def moving_parts(case: CaseResult) -> tuple[str, ...]:
    """Return the parts in words, always in the same order."""
    if case.strategy == AUTO:
        # The solver chooses which of them its plan has, so a reader has to know all.
        return _OPTIM, _GRADS, _PARAMS, _REGATHER, _PER_UNIT, *_MODES.get(case.mode, ())
    placement = STRATEGIES[case.strategy]
    has = {
        _OPTIM: placement.optim is SHARDED,
        _GRADS: placement.grads is SHARDED,
        _PARAMS: placement.params is SHARDED,
        _REGATHER: placement.reshard_after_forward,
    }
    return *(part for part, is_there in has.items() if is_there), *_MODES.get(case.mode, ())


def is_simpler(one: CaseResult, other: CaseResult) -> bool:
    """Return whether the parts of `one` are a proper subset of the other's."""
    return set(moving_parts(one)) < set(moving_parts(other))


def missing_parts(one: CaseResult, other: CaseResult) -> str:
    """Return what the simpler one lacks: "no sharded gradients or CUDA graph"."""
    parts = [part for part in moving_parts(other) if part not in moving_parts(one)]
    return "no " + " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
