"""A step that broke off while it was captured: nothing of it was computed, and what it left behind must not be used."""

from torch.optim import Optimizer

from shardwise.engine.engine import Engine


def abandon_step(engine: Engine, optimizer: Optimizer) -> None:
    """The engine as it was before the step.

    Collectives that were captured never run, so nobody may wait for them; what was gathered lies in a graph's memory.
    Parameters and optimizer state were not touched: their update would have been computed by a replay.
    """
    runner = engine.runner
    for unit in runner.units.values():
        for flat in unit.flats:
            flat.gathering = None
            flat.awaits_grads = False
            flat.drop_grads(set(range(len(flat.params))))
        unit.used.clear()
        # Replicated parameters still hold what they held.
        unit.arrived = unit.whole
        unit.free()
    for bucket in runner.executor.buckets.values():
        for segment in bucket.segments:
            segment.work = None
            segment.holds = False
            segment.release()
    runner.flags.work = None
    runner.hooks.abandon_backward()
    runner.forwards = 0
    runner.called = False
    optimizer.zero_grad(set_to_none=True)
