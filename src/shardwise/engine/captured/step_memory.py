"""Memory that captured and ordinary steps share, so that together they need no more than one of them does.

A graph writes to the addresses that it was recorded with. They are in a pool (step_pool.py), and ordinary steps and
evaluations allocate there too: they never run at the same time as a replay. To the allocator, memory that a graph uses
only within a replay is free. So the next replay would overwrite a tensor that an ordinary step leaves alive there.
Results of a step are copied out of the pool; other live tensors are searched for before a replay (`is_clear`), and if
there are any, all graphs are dropped and recorded again. A recording never uses memory that is in use, so tensors that
are alive then, such as the optimizer's state, are safe.

Without graphs the pool is as good as the allocator's own memory, with one exception: the allocator does not return its
unused blocks when the device is full. Steps of new shapes may need that memory; then they leave the pool.
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.graphs.reads import NotCaptured
from shardwise.engine.graphs.step_device import FULL
from shardwise.engine.graphs.step_pool import Block
from shardwise.engine.optimizer.allocate import move_states

STEPS = "ordinary steps"
EVALUATIONS = "evaluations"
# Tensors that a user of the pool leaves alive may drop all graphs this many times.
_MOST_COSTS = 2
# Results of evaluations up to this size, such as a loss, are always copied.
_SMALL_BYTES = 2**20
# A graph may keep blocks of this size in use, such as the state of its random numbers.
_TINY_BYTES = 512


class Pool(Protocol):
    """The methods of StepPool."""

    is_filled: bool
    id: Any

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...
    def blocks(self, *, settled: bool = False) -> set[Block]: ...
    def renew(self) -> None: ...


class MemoryDevice(Protocol):
    """What is used of StepDevice here."""

    device: torch.device

    def settle(self) -> None: ...
    def free_share(self) -> float: ...
    def release_memory(self) -> None: ...


class StepMemory:
    """One pool, its users, and the blocks that graphs do not write."""

    def __init__(self, pool: Pool, *, device: MemoryDevice, optimizer: Optimizer) -> None:
        self.pool = pool
        self._device = device
        self._optimizer = optimizer
        # Whether there will be replays; whether a graph is being recorded in the pool.
        self.has_replays = True
        self.is_recording = False
        # Who may use the pool; who has used it since it was last clear; and how often each has cost all graphs.
        self._sharing = {STEPS, EVALUATIONS}
        self._users: set[str] = set()
        self._costs = {STEPS: 0, EVALUATIONS: 0}
        # Hashes of the shapes of steps so far.
        self._shapes: set[int] = set()
        # Blocks that were in use when the graphs were recorded, which they do not write; and those of their results.
        self._kept: list[Block] = []
        self._results: list[set[Block]] = []

    # Ordinary steps and evaluations

    def is_shared_with(self, user: str) -> bool:
        return user in self._sharing

    @contextmanager
    def of_step(self, inputs: Any) -> Iterator[None]:
        """Allocate in the pool during an ordinary step."""
        self._make_room(inputs)
        entered = self.enter(STEPS)
        try:
            yield
        finally:
            if entered:
                self.pool.end()

    def enter(self, user: str) -> bool:
        """Allocate in the pool until `pool.end()`; return False if this user may not."""
        if self.pool.is_filled or self.is_recording or user not in self._sharing:
            return False
        self._users.add(user)
        self.pool.begin()
        return True

    def _make_room(self, inputs: Any) -> None:
        """Free memory on a full device for steps of new shapes, which need blocks of other sizes."""
        shapes = hash(tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
        if shapes in self._shapes:
            return
        self._shapes.add(shapes)
        if STEPS in self._sharing and len(self._shapes) > 1 and self._device.free_share() < FULL:
            if self._results:
                self._device.release_memory()
            else:
                self.leave()

    def leave(self) -> None:
        """Leave the pool to graphs. The optimizer's state moves out of it."""
        self._sharing.clear()
        self.pool.end()
        self.pool.renew()
        move_states(self._optimizer, device=self._device.device, release_memory=self._device.release_memory)

    # Graphs

    def begin_recording(self) -> set[Block]:
        """Return the blocks that are in use before a graph is recorded."""
        return self.pool.blocks()

    def end_recording(self, before: set[Block], *, result: Any) -> set[Block]:
        """Return the blocks that the graph keeps in use: its result, and small ones of torch's.

        Raises NotCaptured if there are more: replays would overwrite a tensor that is still used.
        """
        # Cycles of references would keep other tensors of the recording alive.
        gc.collect()
        new = self.pool.blocks() - before
        returned = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if any(start not in returned and end - start > _TINY_BYTES for start, end in new):
            raise NotCaptured("the step keeps tensors that it does not return")
        self._kept = sorted(before.difference(*self._results))
        self._results.append(new)
        return new

    def forget(self, held: set[Block]) -> None:
        """Forget the blocks of a graph that was released."""
        self._results = [other for other in self._results if other is not held]

    def is_clear(self) -> bool:
        """Return whether replays overwrite no tensor that is still in use."""
        if not self._users or not self._results:
            return True
        if not self._is_kept(self.pool.blocks()):
            gc.collect()
            self._device.settle()
            if not self._is_kept(self.pool.blocks(settled=True)):
                return False
        self._users.clear()
        return True

    def _is_kept(self, blocks: set[Block]) -> bool:
        """Return whether each block belongs to a graph's result, or to memory that no graph writes."""
        for held in self._results:
            # A block that is no longer in use may be used by others next.
            held &= blocks
        starts = [start for start, _ in self._kept]
        for start, end in blocks.difference(*self._results):
            place = bisect_right(starts, start) - 1
            if place < 0 or end > self._kept[place][1]:
                return False
        return True

    def blame(self) -> str:
        """Note that live tensors have cost all graphs; return the user that now loses the pool ("": none)."""
        users, self._users = self._users, set()
        if not users:
            # The tensors are alive on another rank.
            return ""
        user = EVALUATIONS if EVALUATIONS in users else STEPS
        self._costs[user] += 1
        if self._costs[user] < _MOST_COSTS:
            return ""
        self._sharing.discard(user)
        return user

    def copied_out(self, result: Any, *, user: str) -> Any:
        """Return the result of a step or an evaluation, copied to where no replay writes.

        The result of an evaluation is often large, and gone before the next step. So it is copied only after one has
        outlived its evaluation.
        """
        if not self.has_replays:
            return result
        most_bytes = math.inf if user == STEPS or self._costs[user] else _SMALL_BYTES

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.numel() * tensor.element_size() <= most_bytes else tensor

        return tree_map_only(Tensor, copied, result)
