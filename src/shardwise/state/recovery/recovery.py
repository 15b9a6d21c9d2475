"""Keeps a training in memory while it runs, and brings it back. `shardwise train` and `protect` are built on this.

after each step   ranks exchange the step of their newest whole snapshot (comm/groups/step_flags.py) ──▶ all know the
                  newest one that is whole on all ranks, and begin the next one at the same step
at a start        the newest whole generation is found and loaded; older files go when a new one is whole
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError
from shardwise.base.vocabulary.quantities import bytes_text, seconds_text
from shardwise.comm.groups.step_flags import StepFlags
from shardwise.engine.prepared.average import EMA
from shardwise.engine.torch_engine.plain_model import state_of
from shardwise.state.checkpoint.checkpoints import Loaded
from shardwise.state.checkpoint.contents import snapshot
from shardwise.state.checkpoint.late_numbers import LateNumbers
from shardwise.state.checkpoint.ranks import Ranks
from shardwise.state.recovery.buddies import Buddies
from shardwise.state.recovery.cadence import Cadence
from shardwise.state.recovery.finding import Generation, Nodes, newest_whole
from shardwise.state.recovery.generation import NoRoom, start_of_file
from shardwise.state.recovery.memory_folder import MemoryFolder, free_leftovers
from shardwise.state.recovery.restoring import restore
from shardwise.state.recovery.two_generations import NUM_GENERATIONS, Snapshots

Tell = Callable[[str], None]
_WHOLE, _EVERY, _REFUSED = "snapshot is whole", "steps between snapshots", "no snapshots"
_COPIED = "steps until a snapshot is whole"


class Recovery:
    """The snapshots of one training. Making it, and every method, is collective.

    key     names the memory of this job on every node (memory_key.py)
    flags   are exchanged by the caller after each step, before `due`
    every   take a snapshot every so many steps; None: as often as costs 1% of the time
    copies  1: with several nodes, keep a copy of each rank's snapshot on another node
    tell    shows a line to the user; called on rank 0
    """

    def __init__(self, *, key: str, flags: StepFlags, every: int | None = None, copies: int = 1, tell: Tell) -> None:
        self._flags = flags
        self._ranks = Ranks()
        self._tell = tell if self._ranks.index == 0 else lambda line: None
        self._folder = self._ranks.together(lambda: MemoryFolder(key, rank=self._ranks.index))
        self._nodes = Nodes(of_ranks=tuple(self._ranks.each(lambda: self._folder.node)))
        self._near = frozenset(self._nodes.ranks(self._folder.node))
        self._start = self._ranks.by_first(lambda: secrets.token_hex(8))
        self._free_leftovers(key)
        self._snapshots = Snapshots(
            self._folder, start=self._start, rank=self._ranks.index, num_ranks=self._ranks.count
        )
        if copies and len(self._nodes.names) > 1:
            self._snapshots.buddies = Buddies(self._folder, rank=self._ranks.index, nodes=self._nodes)
        self._asked, self._cadence = every, Cadence()
        # The step of the last snapshot that was begun, the seconds that it took from training, and whether these count.
        self._begun, self._stall_seconds, self._measured = -1, 0.0, True
        self._told_every = 0
        # The newest step of which anything was in memory at the start.
        self.newest_step = -1
        self._refusal = ""
        self._off = False
        # Files of earlier starts are kept until a new generation is whole.
        self._keeps_old = True
        flags.register(_WHOLE, lambda: -self._snapshots.whole)
        flags.register(_EVERY, self._wanted_every)
        flags.register(_REFUSED, lambda: int(bool(self._refusal)))
        flags.register(_COPIED, lambda: self._cadence.steps_to_copy)

    # At a start

    def find(self) -> Generation | None:
        """Return the newest whole generation, and tell what is damaged or lost of newer ones."""
        search = newest_whole(self._folder, ranks=self._ranks, nodes=self._nodes)
        for note in search.notes:
            self._tell(note)
        self.newest_step = search.newest_step
        return search.generation

    def load(
        self, generation: Generation, model: nn.Module, optimizer: Optimizer | None, *, ema: EMA | None = None
    ) -> Loaded | None:
        """Fill the model and the optimizer; return None, and tell why, if the snapshot does not fit them."""
        ranks, nodes = self._ranks, self._nodes
        try:
            loaded = restore(generation, model, optimizer, folder=self._folder, ranks=ranks, nodes=nodes, ema=ema)
        except CheckpointError as error:
            self._tell(f"the snapshot of step {generation.step} in memory is not used: {error}")
            return None
        keep = {name for one in generation.held for name in (str(one.record.name), one.record.data)}
        self._remove_old(keep=keep)
        return loaded

    # After each step

    def due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step: the same on every rank. Call it after each step."""
        self._cadence.step_ended(time.perf_counter())
        if self._off:
            return False
        agreed = self._flags.agreed
        if agreed[_REFUSED]:
            self._turn_off()
            return False
        with self._refusing():
            self._snapshots.check()
        whole, every = -agreed[_WHOLE], agreed[_EVERY]
        if self._begun < 0:
            return True
        if whole < self._begun:
            return False
        if self._keeps_old:
            self._remove_old(keep=set())
            self._keeps_old = False
        self._tell_cost(every)
        return step - self._begun >= every

    def take(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        step: int,
        progress: Mapping[str, Any],
        own: Mapping[str, Any],
        ema: EMA | None = None,
    ) -> None:
        """Begin a snapshot of this step; the arguments are those of `Checkpoints.save`."""
        begun = time.perf_counter()
        state_of(model).listen_to_writes(optimizer, self._release)
        self._begun, self._stall_seconds, self._measured = step, 0.0, False
        late = LateNumbers()
        with self._refusing():
            taken = snapshot(
                model,
                optimizer,
                step=step,
                progress=progress,
                own=own,
                ranks=self._ranks,
                ema=ema,
                # With copies, each node holds all that its ranks have.
                sharers=None if self._snapshots.buddies is None else self._near,
                check_finite=False,
                late=late,
            )
            self._snapshots.begin(taken, late=late)
        self._stalled(time.perf_counter() - begun - self._snapshots.reserve_seconds)
        self._cadence.stalled(self._snapshots.reserve_seconds)

    def close(self) -> None:
        """Free the snapshots: the training is over."""
        self._snapshots.join()
        # Ranks of a node share the folder.
        self._ranks.together(lambda: None)
        self._folder.free()
        if self._snapshots.buddies is not None:
            self._snapshots.buddies.leave()
        self._ranks.leave()

    def release(self) -> None:
        """Let another start use the snapshots. Not collective; after `close` it does nothing."""
        self._snapshots.join()
        self._folder.release()

    # The state is not written while it is copied

    def _release(self, *_: object) -> None:
        """Wait for the copies: something is about to write the state."""
        begun = time.perf_counter()
        self._snapshots.release_sources()
        self._stalled(time.perf_counter() - begun)

    # What it costs

    def _stalled(self, seconds: float) -> None:
        self._stall_seconds += seconds
        self._cadence.stalled(seconds)

    def _measure(self) -> None:
        if not self._measured and self._snapshots.whole == self._begun:
            self._measured = True
            snapshots = self._snapshots
            # Ranks on CPUs compute with the cores that copy; where they share cores, each waits for the others' copies.
            sharers = max(1.0, len(self._near) / len(os.sched_getaffinity(0)))
            on_cpu = snapshots.thread_seconds * sharers
            busy = snapshots.lost_seconds(self._cadence.step_seconds) if snapshots.on_gpu else on_cpu
            self._cadence.took(cost_seconds=self._stall_seconds + busy, copy_seconds=snapshots.copy_seconds)

    def _wanted_every(self) -> int:
        self._measure()
        return self._asked or self._cadence.every

    @property
    def host_bytes(self) -> dict[str, int]:
        """Host memory that this rank uses: for its own snapshots, and for the copies that it keeps for other ranks."""
        buddies = self._snapshots.buddies
        return {"snapshots": self._snapshots.host_bytes, "copies": 0 if buddies is None else buddies.host_bytes}

    def _tell_cost(self, every: int) -> None:
        """Tell k when it is known, and when it has changed much."""
        told = self._told_every and self._told_every / 2 < every < self._told_every * 2
        if told or not self._cadence.step_seconds:
            return
        self._told_every = every
        size, step = self._snapshots.num_bytes, self._cadence.step_seconds
        buddies = self._snapshots.buddies
        copied = f", of which {bytes_text(buddies.num_bytes)} also on another node" if buddies is not None else ""
        share = self._cadence.cost_seconds / (every * step) if step else 0.0
        # Until a snapshot is whole, a restart uses the one before it.
        again = every + self._flags.agreed[_COPIED] - 1
        self._tell(
            f"Snapshots in memory every {_steps(every)}: {bytes_text(size)} per rank{copied} "
            f"({NUM_GENERATIONS} generations), {seconds_text(self._cadence.cost_seconds)} each, {share:.1%} of the "
            f"time; a restart computes at most {_steps(again)} again"
        )

    # Without room

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Note why this rank can keep no snapshot; all ranks learn of it with the next flags, and stop taking them."""
        try:
            yield
        except NoRoom as error:
            self._refusal = self._no_room(error)
        except OSError as error:
            self._refusal = f"{error.filename or self._folder.path}: {error.strerror}"

    def _no_room(self, error: NoRoom) -> str:
        needed = NUM_GENERATIONS * error.num_bytes * len(self._near)
        return (
            f"{self._folder.path.parent} has no room for snapshots: {len(self._near)} ranks need {bytes_text(needed)} "
            "there; make it larger (mount -o remount,size=… /dev/shm, docker run --shm-size=…)"
        )

    def _turn_off(self) -> None:
        reasons = self._ranks.each(lambda: self._refusal)
        self._off = True
        self._snapshots.discard()
        self._tell(f"{next(filter(None, reasons))}; training continues without snapshots in memory")

    def _remove_old(self, *, keep: set[str]) -> None:
        """Remove files of earlier starts on this node, except `keep`."""
        if min(self._near) != self._ranks.index:
            return
        old = (name for name in self._folder.names() if start_of_file(name) not in ("", self._start))
        self._folder.remove(*(name for name in old if name not in keep))

    def _free_leftovers(self, key: str) -> None:
        first = min(self._near) == self._ranks.index
        freed = self._ranks.each(lambda: free_leftovers(own_key=key) if first else (0, 0))
        count, num_bytes = sum(count for count, _ in freed), sum(size for _, size in freed)
        if count:
            jobs = "a job that is gone" if count == 1 else f"{count} jobs that are gone"
            self._tell(f"Freed {bytes_text(num_bytes)} of memory that {jobs} had left")


def _steps(count: int) -> str:
    return f"{count} {'step' if count == 1 else 'steps'}"
