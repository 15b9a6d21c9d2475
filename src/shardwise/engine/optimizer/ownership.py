"""Parameters that one rank is to own become so while a program is followed."""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.engine.core import step_errors
from shardwise.engine.core.core import Core
from shardwise.plan.patterns import short_patterns


def own(core: Core, names: Sequence[str]) -> None:
    """From the next update on each of these parameters is stepped whole, by the rank that owns it."""
    new = [name for name in names if not core.plan.owns(name)]
    if not new:
        return
    if core.holds_grads:
        raise step_errors.not_reduced_yet()
    every = [name for flat in core.flats for name in flat.names]
    core.follow_plan(replace(core.plan, owned=(*core.plan.owned, *short_patterns(new, among=every))))
