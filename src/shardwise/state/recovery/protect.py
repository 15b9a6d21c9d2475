"""`shardwise.protect`: recovery from memory for a training loop of your own."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError, InvalidData
from shardwise.comm.groups.agreement import on_each_rank
from shardwise.comm.groups.step_flags import StepFlags
from shardwise.comm.job.join import join_job
from shardwise.engine.prepared.average import EMA
from shardwise.engine.random_states import random_states, restore_random_states
from shardwise.state.checkpoint.checkpoints import Checkpoints, Loaded
from shardwise.state.recovery.memory_key import key_for, key_of_job
from shardwise.state.recovery.newest import newest_state
from shardwise.state.recovery.recovery import Recovery

_OBJECTS, _VALUES = "objects", "values"


class Protection:
    """A training that is kept in memory.

    step     the step after which it stands: 0 at first, later what was brought back
    values   what `completed` was given with that step: by this rank, or by rank 0 if their number has changed
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        ema: EMA | None,
        recovery: Recovery,
        flags: StepFlags,
        progress: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._ema = model, optimizer, ema
        self._recovery, self._flags, self._progress, self._device = recovery, flags, progress, device
        self._states: Mapping[str, Any] | None = None
        self.step = 0
        self.values: dict[str, Any] = {}

    def completed(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Say that a step is over; every few steps this takes a snapshot. Collective: after each step, on every rank.

        Call it last in the step, after the scheduler and the sampler have advanced. `values` are numbers, strings,
        lists and dicts of your own, which `protect` returns after a restart.
        """
        self.step = step
        self._flags.exchange()
        if self._recovery.due(step):
            state = self.state(values or {})
            self._recovery.take(self._model, self._optimizer, step=step, ema=self._ema, **state)

    def state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the progress of the training, for `Checkpoints.save(…, **protection.state(values))`."""
        objects = {name: one.state_dict() for name, one in self._progress.items()}
        progress = {_OBJECTS: objects, _VALUES: dict(values)}
        # On as many ranks each gets its own again, since they may stand at different places in their data.
        return {"progress": progress, "own": {**random_states(self._device), **progress}}

    def take_over(self, loaded: Loaded) -> None:
        """Give the loaded progress to its objects."""
        self.step = loaded.step
        progress = loaded.progress if loaded.own is None else loaded.own
        self.values, objects = progress.get(_VALUES, {}), progress.get(_OBJECTS, {})
        for name, one in self._progress.items():
            if name not in objects:
                raise CheckpointError(f"progress: {name} was not saved; {', '.join(objects) or 'nothing'} was")
            one.load_state_dict(objects[name])
        self._states = loaded.own
        self.restore_random_states()

    def restore_random_states(self) -> None:
        """Set the random generators to where the step ended. `protect` does it; do it again if what follows draws."""
        if self._states is not None:
            restore_random_states(self._states, device=self._device)

    def release(self) -> None:
        """Leave the snapshots to another start, from a process that lives on. Not collective."""
        self._recovery.release()

    def close(self) -> None:
        """Free the memory: the training is over. Collective."""
        self._flags.close()
        self._recovery.close()


def protect(
    model: nn.Module,
    optimizer: Optimizer,
    progress: Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    ema: EMA | None = None,
    every: int | None = None,
    copies: int = 1,
    tell: Callable[[str], None] | None = None,
) -> Protection:
    """Keep a training in memory, so that a rank that dies costs seconds; bring it back after a restart. Collective.

        run = shardwise.protect(model, optimizer, {"scheduler": scheduler, "sampler": sampler})
        for step in range(run.step + 1, num_steps + 1):
            ...
            optimizer.step()
            scheduler.step()
            run.completed(step)
        run.close()

    Every few steps, each rank copies what it owns to /dev/shm while the next step computes. When the ranks are started
    again, this call loads the newest copy that is whole, also on another number of ranks, with the random generators.

    progress      objects with state_dict and load_state_dict, such as schedulers, samplers, a GradScaler
    folder        one that all ranks see: keeps the key of the snapshots, so that the same command finds them again.
                  Without it, our launcher or torchrun keeps it, as long as that lives
    checkpoints   the newest of these is loaded if it is newer, or if a part of the state is in no memory
    every         steps between snapshots (default: as often as costs 1% of the time, which is measured)
    copies        with several nodes, copies of each snapshot on another node: 1, or 0 for none
    tell          shows a line, on rank 0 (default: standard error)
    """
    progress = dict(progress or {})
    for name, one in progress.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise InvalidData(
                f"progress: {name} is a {type(one).__name__}, without state_dict and load_state_dict: give values of "
                "your own to completed(step, values)"
            )
    if every is not None and every < 1:
        raise InvalidData(f"every = {every}: must be at least 1")
    if copies not in (0, 1):
        raise InvalidData(f"copies = {copies}: must be 0 or 1")
    device = join_job(_device(model))
    key = on_each_rank(lambda: (key_for(Path(folder)) if folder else key_of_job()) if _is_first() else "")[0]
    flags = StepFlags()
    tell = (tell or _print) if _is_first() else _say_nothing
    recovery = Recovery(key=key, flags=flags, every=every, copies=copies, tell=tell)
    protection = Protection(model, optimizer, ema=ema, recovery=recovery, flags=flags, progress=progress, device=device)
    loaded = newest_state(recovery, model, optimizer, checkpoints=checkpoints, ema=ema, tell=tell)
    if loaded is not None:
        protection.take_over(loaded)
    return protection


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0


def _device(model: nn.Module) -> torch.device | None:
    with suppress(StopIteration):
        return next(model.parameters()).device
    return None


def _say_nothing(line: str) -> None:
    pass


def _print(line: str) -> None:
    print(f"shardwise: {line}", file=sys.stderr, flush=True)
