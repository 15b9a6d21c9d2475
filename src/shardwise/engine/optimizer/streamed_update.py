"""Updates of states that live in host memory, computed by the device.

A step of the optimizer updates what is on the device as ever. Then masters and optimizer state pass through the device,
one chunk after the other: in, updated by the optimizer's own code, out again. The three happen at the same time, each
to another chunk, and while the device computes the next forward: a unit's update is waited for where the unit is
gathered next. Each element is updated by the same operations as on the device, so the results are the same bits.
"""

import inspect
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan
from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.master import Owned
from shardwise.engine.core.parameters import parameter_like, set_grad
from shardwise.engine.optimizer.allocate import allocate_states
from shardwise.engine.optimizer.known import ELEMENTWISE, name_of
from shardwise.engine.optimizer.update_chunks import ChunkSlot, Piece, UpdateStreams, chunks
from shardwise.plan import Plan
from shardwise.program.chunks import CHUNK_ELEMENTS, NUM_SLOTS
from shardwise.program.rules.context import MOST_GRADS, overdue

# Slots keep what the first step made until the second uses them again.
_STEPS_THAT_MAKE = 2


def check_streamed(optimizer: Optimizer, *, plan: Plan) -> None:
    """Refuse an optimizer whose update of a part of a parameter may differ from that part of its update."""
    if type(optimizer) in ELEMENTWISE:
        return
    if plan.offload_states and plan.offload_update == "device":
        raise InvalidPlan(
            f"offload_states with {name_of(optimizer)}: only torch's own elementwise optimizers can update states that "
            "pass through the device in parts; set offload_update = 'host'"
        )
    if plan.updates_in_backward:
        raise InvalidPlan(
            f"update = 'backward' with {name_of(optimizer)}: only torch's own elementwise optimizers can update "
            "parameters one after the other; set update = 'step'"
        )


def empty_stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class and options, with the same groups but no parameters and no state."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    stand_in.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": defaultdict(dict)}
    return stand_in


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the number of the group of each parameter, by the parameter's id."""
    return {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}


def plain_step(optimizer: Optimizer) -> None:
    """Run the step of an optimizer's class, without the hooks of its objects."""
    inspect.unwrap(type(optimizer).step)(optimizer)


class StreamedUpdate:
    """The updates of one core's states in host memory."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._device = core.setting.device
        self._slots = [ChunkSlot() for _ in range(NUM_SLOTS)]
        self._streams = UpdateStreams(self._device)
        # The state of each flat, laid out as its master is: optimizer.state holds views of it.
        self._states: weakref.WeakKeyDictionary[FlatParams, dict[str, Tensor]] = weakref.WeakKeyDictionary()
        self._taken: list[tuple[FlatParams, Owned, Tensor]] = []
        self._largest = 0
        # Flats whose gradients are read by updates inside backward.
        self._in_flight: deque[tuple[FlatParams, Any]] = deque()
        self._steps_since_made = 0
        core.setting.events.values_read.append(lambda announced: self.settle())
        core.setting.beside.append(self)

    @property
    def flats(self) -> list[FlatParams]:
        """The flats whose states pass through the device."""
        if self._core.setting.host is None:
            return []
        return [flat for flat in self._core.flats if flat.master.passes_through_device]

    def allocate_others(self, optimizer: Optimizer) -> None:
        """Allocate the state of everything else, which stays on the device, before the first update."""
        allocate_states(optimizer, without={id(part.parameter) for flat in self.flats for part in flat.master.owned})

    def slot_tensors(self) -> list[Tensor]:
        """Return the memory through which states pass."""
        return [buffer for slot in self._slots for buffer in slot.buffers.values()]

    def settle(self) -> None:
        """Wait until all updates have written host memory, before anything reads it there."""
        for flat in self.flats:
            flat.master.settle()

    def wait(self) -> None:
        """Let the device wait until updates no longer read gradients."""
        for flat in self.flats:
            self._streams.wait(None, flat.master.update)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Take the gradients of what lives in host memory, which the optimizer's own step then leaves alone."""
        self._give_back()
        stepped = group_numbers(optimizer)
        for flat in self._in_order_of_use():
            for part in flat.master.owned:
                grad = part.parameter.grad
                if grad is not None and id(part.parameter) in stepped:
                    self._taken.append((flat, part, grad))
                    part.parameter.grad = None

    def _in_order_of_use(self) -> list[FlatParams]:
        calls = {unit: place for place, unit in enumerate(dict.fromkeys(self._core.followed.spec.call_order))}
        of_unit = {id(flat): unit.name for unit in self._core.units.values() for flat in unit.flats}
        return sorted(self.flats, key=lambda flat: calls.get(of_unit.get(id(flat), ""), len(calls)))

    def _give_back(self) -> None:
        for _, part, grad in self._taken:
            if part.parameter.grad is None:
                set_grad(part.parameter, grad)
        self._taken = []

    @torch.no_grad()
    def end_step(self, optimizer: Optimizer) -> None:
        """Begin the updates of what lives in host memory."""
        if not self._taken:
            return
        options = self._options(optimizer)
        self._streams.follow_compute()
        by_flat: dict[FlatParams, list[tuple[Owned, Tensor]]] = {}
        for flat, part, grad in self._taken:
            by_flat.setdefault(flat, []).append((part, grad))
        for flat, parts in by_flat.items():
            self._stream(flat, parts, optimizer=optimizer, options=options)
        self._give_back()

    def _options(self, optimizer: Optimizer) -> Optimizer:
        """Return a stand-in with copies of rates that lie on the device: a schedule may write them during an update."""
        stand_in = empty_stand_in(optimizer)
        for group in stand_in.param_groups:
            group |= {key: value.clone() for key, value in group.items() if isinstance(value, Tensor)}
        return stand_in

    def release_first_states(self) -> None:
        """After the second step, give back memory in which the first made the state: no other stream would use it."""
        if self._states and self._steps_since_made < _STEPS_THAT_MAKE:
            self._steps_since_made += 1
            if self._steps_since_made == _STEPS_THAT_MAKE and self._device.type == "cuda":
                torch.cuda.empty_cache()

    def update_in_backward(
        self, flat: FlatParams, parts: Sequence[tuple[Owned, Tensor]], *, optimizer: Optimizer
    ) -> None:
        """Begin the update of a flat whose gradients were just averaged; those of a few flats are kept at a time."""
        options = self._options(optimizer)
        self._streams.follow_compute()
        self._stream(flat, parts, optimizer=optimizer, options=options)
        self._in_flight.append((flat, self._streams.record("step")))
        for earlier, stepped in overdue(self._in_flight, most=MOST_GRADS):
            self._streams.wait(None, stepped)
            earlier.master.was_read()

    def _stream(
        self,
        flat: FlatParams,
        parts: Sequence[tuple[Owned, Tensor]],
        *,
        optimizer: Optimizer,
        options: Optimizer,
    ) -> None:
        self._largest = min(CHUNK_ELEMENTS, max(flat.layout.slice_elements for flat in self.flats))
        before, sent = flat.master.update, None
        for chunk in chunks(parts, largest=self._largest):
            slot = self._slots[0]
            self._slots = [*self._slots[1:], slot]
            sent = self._update(flat, chunk, slot=slot, after=before, optimizer=optimizer, options=options)
        rates = [value for group in options.param_groups for value in group.values() if isinstance(value, Tensor)]
        flat.master.be_written_by(sent, reads=[*(grad for _, grad in parts), *rates])

    def _update(
        self,
        flat: FlatParams,
        chunk: Sequence[Piece],
        *,
        slot: ChunkSlot,
        after: Any,
        optimizer: Optimizer,
        options: Optimizer,
    ) -> Any:
        """Bring a chunk in, update it and send it out; return the event of its end."""
        streams, first, last = self._streams, chunk[0].start, chunk[-1].stop
        master = flat.master.unsettled[first:last]
        with streams.on("bring"):
            # On this stream also the memory: a fill of it (deterministic algorithms) must come before the copy.
            here = self._room(slot, "master", master.numel(), dtype=master.dtype)
            streams.wait("bring", slot.sent)
            streams.wait("bring", after)
            here.copy_(master, non_blocking=True)
            stand_in = self._stand_in(chunk, here, slot=slot, optimizer=optimizer, options=options)
            brought = streams.record("bring")
        with streams.on("step"):
            streams.wait("step", brought)
            plain_step(stand_in)
            cast = None
            if flat.master.is_staged:
                cast = self._room(slot, "staged", master.numel(), dtype=flat.master.staged.dtype).copy_(here)
            stepped = streams.record("step")
        with streams.on("send"):
            streams.wait("send", stepped)
            master.copy_(here, non_blocking=True)
            if cast is not None:
                flat.master.staged[first:last].copy_(cast, non_blocking=True)
            self._send_states(flat, chunk, stand_in, optimizer=optimizer)
            slot.sent = streams.record("send")
        # Not the gradients, which are kept only until the device waits for the update.
        slot.kept = list(stand_in.state.values())
        return slot.sent

    def _room(self, slot: ChunkSlot, name: str, size: int, *, dtype: torch.dtype) -> Tensor:
        return slot.room(name, size, dtype=dtype, device=self._device, largest=self._largest)

    def _stand_in(
        self, chunk: Sequence[Piece], here: Tensor, *, slot: ChunkSlot, optimizer: Optimizer, options: Optimizer
    ) -> Optimizer:
        """Return an optimizer of the same class and options for the pieces of a chunk, with their state."""
        stand_in, first = empty_stand_in(options), chunk[0].start
        number_of = group_numbers(optimizer)
        for piece in chunk:
            parameter, offset = piece.part.parameter, piece.start - piece.part.start
            size = piece.stop - piece.start
            piece.there = there = parameter_like(parameter, here[piece.start - first : piece.stop - first])
            there.grad = piece.grad[offset : offset + size]
            group = stand_in.param_groups[number_of[id(parameter)]]
            group["params"].append(there)
            counts_there = group.get("fused") or group.get("capturable")
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    stand_in.state[there][key] = value
                elif value.shape != parameter.shape:
                    # The optimizer counts up the number of the last piece; earlier ones count for themselves. Loading
                    # leaves it in host memory, where the parameter is.
                    number = value if piece.is_last else value.clone()
                    stand_in.state[there][key] = number.to(self._device) if counts_there else number
                else:
                    room = self._room(slot, key, here.numel(), dtype=value.dtype)[
                        piece.start - first : piece.stop - first
                    ]
                    stand_in.state[there][key] = room.copy_(value[offset : offset + size], non_blocking=True)
        return stand_in

    def _send_states(
        self, flat: FlatParams, chunk: Sequence[Piece], stand_in: Optimizer, *, optimizer: Optimizer
    ) -> None:
        """Copy the state of a chunk's pieces to the host, into memory laid out as the master."""
        for piece in chunk:
            there = piece.there
            assert there is not None
            state = stand_in.state[there]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == there.shape:
                    self._host_state(flat, key, value)[piece.start : piece.stop].copy_(value, non_blocking=True)
            if piece.is_last:
                # Until here, the other pieces of the part were to find the state from before the step.
                optimizer.state[piece.part.parameter] = {
                    key: self._states[flat][key][piece.part.start : piece.part.stop]
                    if isinstance(value, Tensor) and value.shape == there.shape
                    else value
                    for key, value in state.items()
                }

    def _host_state(self, flat: FlatParams, key: str, value: Tensor) -> Tensor:
        """Return host memory for a state of a flat's parameters."""
        assert flat.master.host is not None
        states = self._states.setdefault(flat, {})
        if key not in states:
            self._steps_since_made = 0
            states[key] = flat.master.host.zeros(flat.master.unsettled.numel(), dtype=value.dtype)
        return states[key]

    def join(self) -> None:
        """Let the computation wait for all updates. What they have read and used may be used again."""
        self.wait()
        for flat in self.flats:
            flat.master.was_read()
        for slot in self._slots:
            slot.forget()
