"""A rank that gives up a pass: it takes part in all that is left of it, and adds nothing.

The others cannot do without it: every gather and every sum needs all ranks. So it goes through the rest of the program
as one that calls no unit does, with gradients of weight 0.
"""

import torch

from shardwise.engine.core.runner import Runner


@torch.no_grad()
def finish_skipped(runner: Runner) -> None:
    """The rest of the pass that is under way, or all of the next one."""
    begun, hooks = runner.forwards > 0, runner.hooks
    if not begun:
        runner.before_forward(runner.root)
    for unit in runner.units.values():
        # Nobody will call it: it is freed as soon as the program frees it.
        unit.calls = 0
    if runner.first is None:
        runner.cursor.take_up(in_backward=hooks.in_backward)
    if not hooks.in_backward:
        runner.begin_backward()
    runner.end_backward()
    hooks.abandon_backward()
