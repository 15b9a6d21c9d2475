"""Chooses what a training resumes from: memory, or the disk where that is newer or memory is not whole."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.groups.agreement import exchange
from shardwise.engine.prepared.average import EMA
from shardwise.state.checkpoint.checkpoints import Checkpoints, Loaded
from shardwise.state.checkpoint.folder import checkpoints_in, step_of
from shardwise.state.recovery.recovery import Recovery


def newest_state(
    recovery: Recovery | None,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    checkpoints: Checkpoints | None,
    ema: EMA | None = None,
    tell: Callable[[str], None],
) -> Loaded | None:
    """Load the newest state; None without any. Collective. `tell` shows a line to the user."""
    generation = recovery.find() if recovery is not None else None
    from_memory = generation is not None and _newest_step(checkpoints) <= generation.step
    if recovery is not None and generation is not None and from_memory:
        loaded = recovery.load(generation, model, optimizer, ema=ema)
        if loaded is not None:
            tell(f"Loaded the snapshot of step {loaded.step} from memory")
            return loaded
    saved = checkpoints.latest() if checkpoints is not None else None
    newer = saved is not None and generation is not None and saved.step > generation.step
    if recovery is not None and generation is not None and not from_memory and not newer:
        # There was the name of a newer checkpoint, but it is damaged.
        return recovery.load(generation, model, optimizer, ema=ema)
    if checkpoints is None or saved is None:
        return None
    tell(f"Loading checkpoint {saved.path.name} …")
    loaded = checkpoints.load(saved, model, optimizer, ema=ema)
    lost = recovery.newest_step - loaded.step if recovery is not None else 0
    if lost > 0:
        tell(f"{lost} steps after {saved.path.name} were in memory only, and are computed again")
    return loaded


def _newest_step(checkpoints: Checkpoints | None) -> int:
    """Return the step of the newest checkpoint by its name, on every rank; -1 without one. Nothing of it is read."""
    found = checkpoints_in(checkpoints.folder) if checkpoints is not None and dist.get_rank() == 0 else []
    step: int = exchange(step_of(found[-1]) if found else -1)[0]
    return step
