"""Parameters that one rank is to own become so while a program is followed."""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.engine.core import step_errors
from shardwise.engine.core.runner import Runner
from shardwise.plan.patterns import short_patterns
from shardwise.program import build


def own(runner: Runner, names: Sequence[str]) -> None:
    """From the next update on each of these parameters is stepped whole, by the rank that owns it."""
    new = [name for name in names if not runner.plan.owns(name)]
    if not new:
        return
    if runner.executor.holds_grads:
        raise step_errors.not_reduced_yet()
    every = [name for unit in runner.units.values() for flat in unit.flats for name in flat.names]
    runner.plan = replace(runner.plan, owned=(*runner.plan.owned, *short_patterns(new, among=every)))
    runner.follow(build(runner.spec, plan=runner.plan))
