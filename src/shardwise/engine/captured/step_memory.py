"""Memory that captured and ordinary steps share, so that together they take no more than one of them does.

A graph writes to the addresses that it was recorded with. They lie in a pool (step_pool.py), and ordinary steps and
evaluations allocate there too: they never run at the same time as a replay. To the allocator, what a graph uses within
a replay is free memory. So a tensor that an ordinary step leaves alive there would be overwritten by the next replay.
What a step returns is copied out of the pool; the rest is looked for before a replay (`is_clear`), and if there is any,
all graphs go. They are recorded again, around it. What lives in the pool when a graph is recorded, such as the
optimizer's state, is safe: the graph is recorded around it.

Where no graph is recorded, the pool is as good as the allocator's own memory, but for one thing: the allocator does not
give back what it keeps there when the device is full. Steps of new shapes may need that; then they leave the pool.
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.captured.reads import NotCaptured
from shardwise.engine.captured.step_pool import Block

STEPS = "ordinary steps"
EVALUATIONS = "evaluations"
# A device with less of its memory free than this is full.
FULL = 0.1
# So often may what one of them leaves behind cost all graphs.
_MOST_COSTS = 2
# What is copied in any case, such as a loss.
_SMALL_BYTES = 2**20
# A graph may hold so much for itself, such as the state of its random numbers.
_TINY_BYTES = 512
# Tensors that move out of the pool before the memory that they leave is given back.
_MOVED_TOGETHER = 16


class Pool(Protocol):
    """As StepPool."""

    is_filled: bool
    id: Any

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def break_off(self) -> None: ...
    def blocks(self, *, settled: bool = False) -> set[Block]: ...
    def renew(self) -> None: ...


class MemoryDevice(Protocol):
    """As StepDevice."""

    def settle(self) -> None: ...
    def free_share(self) -> float: ...
    def release_memory(self) -> None: ...


class StepMemory:
    """One pool, who uses it, and what of it graphs write into."""

    def __init__(self, pool: Pool, *, device: MemoryDevice, optimizer: Optimizer) -> None:
        self.pool = pool
        self._device = device
        self._optimizer = optimizer
        # Whether there is any replay from here on; whether a graph is being recorded, in the pool.
        self.has_replays = True
        self.is_recording = False
        # Who uses the pool; since it was last found clear; and whom that has cost all graphs how often.
        self._sharing = {STEPS, EVALUATIONS}
        self._users: set[str] = set()
        self._costs = {STEPS: 0, EVALUATIONS: 0}
        # Shapes of steps so far, as one number each.
        self._shapes: set[int] = set()
        # What was in use when the graphs were recorded: they write into none of it. And what they hold themselves.
        self._kept: list[Block] = []
        self._results: list[set[Block]] = []

    # Ordinary steps and evaluations

    def is_shared_with(self, user: str) -> bool:
        return user in self._sharing

    @contextmanager
    def of_step(self, inputs: Any) -> Iterator[None]:
        """What the ordinary step in here allocates lies in the pool."""
        self._make_room(inputs)
        entered = self.enter(STEPS)
        try:
            yield
        finally:
            if entered:
                self.pool.end()

    def enter(self, user: str) -> bool:
        """Allocate in the pool until `pool.end()`; whether that is so."""
        if self.pool.is_filled or self.is_recording or user not in self._sharing:
            return False
        self._users.add(user)
        self.pool.begin()
        return True

    def _make_room(self, inputs: Any) -> None:
        """Steps of new shapes take blocks of other sizes. On a full device the allocator has to give back others."""
        shapes = hash(tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
        if shapes in self._shapes:
            return
        self._shapes.add(shapes)
        if STEPS in self._sharing and len(self._shapes) > 1 and self._device.free_share() < FULL:
            if self._results:
                self._device.release_memory()
            else:
                self._leave()

    def _leave(self) -> None:
        """Graphs alone use the pool from here on. The optimizer's state moves out of it, a few tensors at a time."""
        self._sharing.clear()
        self.pool.renew()
        states = [(state, key) for state in self._optimizer.state.values() for key in state]
        # Other optimizers may hold on to their state by other ways.
        known = type(self._optimizer).__module__.startswith("torch.optim.")
        moved = [place for place in states if known and isinstance(place[0][place[1]], Tensor)]
        for number, (state, key) in enumerate(sorted(moved, key=lambda place: place[0][place[1]].data_ptr())):
            state[key] = state[key].clone()
            if number % _MOVED_TOGETHER == 0:
                self._device.release_memory()
        self._device.release_memory()

    # Graphs

    def begin_recording(self) -> set[Block]:
        """A graph is recorded from here on; what is in use."""
        return self.pool.blocks()

    def end_recording(self, before: set[Block], *, result: Any) -> set[Block]:
        """What the graph holds in the pool: its result, and small things of torch's own.

        Raises NotCaptured where there is more: whoever holds that would find it overwritten by replays.
        """
        # Of what was recorded, nothing else may be alive, not even in a cycle of references.
        gc.collect()
        new = self.pool.blocks() - before
        returned = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if any(start not in returned and end - start > _TINY_BYTES for start, end in new):
            raise NotCaptured("the step keeps tensors that it does not return")
        self._kept = sorted(before.difference(*self._results))
        self._results.append(new)
        return new

    def forget(self, held: set[Block]) -> None:
        """The graph that holds these is gone."""
        self._results = [other for other in self._results if other is not held]

    def is_clear(self) -> bool:
        """Whether replays overwrite nothing that is still in use."""
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
        """Whether each of them is a graph's own, or lies within what no graph writes into."""
        for held in self._results:
            # What is no longer in use may be used by others next.
            held &= blocks
        starts = [start for start, _ in self._kept]
        for start, end in blocks.difference(*self._results):
            place = bisect_right(starts, start) - 1
            if place < 0 or end > self._kept[place][1]:
                return False
        return True

    def blame(self) -> str:
        """All graphs went because of what is alive. Who no longer shares the pool for it; "" if that is nobody."""
        users, self._users = self._users, set()
        if not users:
            # It is alive on another rank.
            return ""
        user = EVALUATIONS if EVALUATIONS in users else STEPS
        self._costs[user] += 1
        if self._costs[user] < _MOST_COSTS:
            return ""
        self._sharing.discard(user)
        return user

    def taken_out(self, result: Any, *, user: str) -> Any:
        """What a step or an evaluation returned, where no replay writes.

        What an evaluation returns is often large, and gone before the next step. So it is copied only once it was not.
        """
        if not self.has_replays:
            return result
        most_bytes = math.inf if user == STEPS or self._costs[user] else _SMALL_BYTES

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.numel() * tensor.element_size() <= most_bytes else tensor

        return tree_map_only(Tensor, copied, result)
