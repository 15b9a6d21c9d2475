"""Reads of a head or an embedding outside of its own forward: `F.linear(hidden, model.head.weight)` in a fused loss.

In the root these parameters would be there. As units of their own (UnitSpec.from_root) they are gathered where they are
read: a read before any call is a call of the unit. How backward comes to it is not known, so it stays gathered until
backward is over. After the first step the program has the call, and gathers ahead of it.
"""

from shardwise.engine.core.runner import Runner
from shardwise.engine.core.unit import Unit
from shardwise.spec import UNANNOUNCED


def lend(runner: Runner, unit: Unit) -> bool:
    """Make the unit's parameters readable if those of the root are; return whether they are."""
    first = runner.executor.first
    if runner.hooks.in_backward:
        runner.serve(unit)
    elif not runner.forwards:
        return runner.evaluation.lend(unit)
    elif first is not None and unit.calls:
        # From now on it stays gathered after the call that it had.
        first.note_backward(unit, UNANNOUNCED)
        first.want(unit)
        runner.serve(unit)
    else:
        runner.before_forward(unit)
        runner.after_forward(unit, backward=UNANNOUNCED)
    return True
