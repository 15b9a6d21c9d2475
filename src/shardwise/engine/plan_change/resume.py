"""A runner that goes on where the runner of another plan has stopped, between two passes (replan.py)."""

from shardwise.engine.core.runner import Runner


def resume(runner: Runner, *, before: Runner) -> None:
    """What was learned of the model need not be learned again. The units of both have the same parameters."""
    runner.called = before.called
    runner.limit_seconds = before.limit_seconds
    runner.flags.same_order.resume_from(before.flags.same_order)
    runner.replicas.resume_from(before.replicas)
    if not before.learned or runner.plan.dynamic:
        return
    runner.seen = before.seen
    trainable: set[str] = set()
    for name, unit in runner.units.items():
        unit.used |= before.units[name].used
        trainable |= unit.learn_trained(before.units[name].learned_trainable)
    runner.learn_program(trainable)
