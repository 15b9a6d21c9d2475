"""The calls of one pass in order: their graphs share memory.

A forward and the calls before it keep what backward needs; a backward frees what its call has kept. The graphs are
recorded in that order, in one pool, so that together they need the memory of one pass. Therefore a replay has to keep
the order: a call may be left out, but a forward never comes after a later call's, and a backward only when those of
all later calls are over. What code outside of the graphs still holds at a replay must have been held at the recording,
when its memory was kept: only then the graph does not write there.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.graphs.given_inputs import GivenInputs
from shardwise.engine.graphs.graph_device import GraphDevice
from shardwise.engine.graphs.handed_gradients import Edges, Handed, hand_over
from shardwise.engine.graphs.not_captured import NotCaptured
from shardwise.engine.graphs.recorded_call import Grads, RecordedCall
from shardwise.engine.graphs.replayed_call import ReplayedCall
from shardwise.engine.graphs.static_place import StaticPlace
from shardwise.engine.graphs.traced_graph import Outputs, TracedGraph
from shardwise.engine.graphs.traced_unit import TracedUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientPlace:
    """Graph memory for a gradient.

    pending     the calls whose backward was still to be recorded when it was allocated; num_calls: all calls then.
                Graphs that were recorded later do not write there
    """

    place: StaticPlace
    pending: set[int]
    num_calls: int


class RecordedPass:
    """The recorded calls of passes whose inputs have one form.

    is_recording   the first pass: calls are added
    is_warm        whether it was recorded after other passes of its form
    failed         why a call could not be recorded; "" if all could
    num_computed   backwards that were computed again instead of replayed
    num_passes     how often it was recorded or replayed
    """

    def __init__(self, device: GraphDevice, *, places_gradients: bool) -> None:
        self.device = device
        self._places_gradients = places_gradients
        self.calls: list[RecordedCall] = []
        self.is_recording = True
        self.is_warm = True
        self.failed = ""
        self.num_computed = 0
        # Whether a graph of this pass differed from its recording; passes in a row in which one did.
        self.missed = False
        self.num_missed = 0
        self.num_passes = 0
        self._pass_number = 0
        self._next = 0
        # The calls of this pass; those whose backward may come, by their position.
        self._replayed: list[RecordedCall] = []
        self._open: dict[int, weakref.ref[ReplayedCall]] = {}
        # Places whose memory may be written by the next graphs, if nobody holds them any more, and those of gradients
        # that were handed over, until they are taken.
        self._lent: list[StaticPlace] = []
        self._handed: list[tuple[weakref.ref[Handed], list[StaticPlace]]] = []
        self._gradients: dict[str, _GradientPlace] = {}
        # While it is recorded: places by address.
        self._places: dict[int, StaticPlace] = {}
        self._sources: list[StaticPlace] = []

    # A pass

    def begin(self, number: int) -> None:
        """Begin a pass; `is_free` has returned True."""
        self._pass_number = number
        self.num_passes += 1
        self.num_missed = self.num_missed + 1 if self.missed else 0
        self.missed = False
        self._next = 0
        self._open.clear()
        self._lent.clear()
        self._handed.clear()
        self._replayed.clear()

    def is_free(self) -> bool:
        """Return whether a pass may begin: nothing that its graphs write is needed any more."""
        if not self.is_over():
            return False
        outputs = (place for call in self._replayed for place in call.outputs)
        gradients = (gradient.place for gradient in self._gradients.values())
        return not any(place.is_lent for places in (outputs, self._lent, gradients) for place in places)

    def note_kept(self) -> bool:
        """Note which outputs are still held, although no backward of this pass can come any more."""
        held = [(call.graph.kept, at) for call in self._replayed for at, one in enumerate(call.outputs) if one.is_lent]
        for kept, number in held:
            kept[number] += 1
        return bool(held)

    @property
    def holds_gradients(self) -> bool:
        """Return whether gradients lie where its graphs write."""
        return any(gradient.place.is_lent for gradient in self._gradients.values())

    def is_over(self) -> bool:
        """Return whether no backward of this pass can come any more."""
        return not any(self._alive(number) for number in list(self._open))

    def _alive(self, number: int) -> bool:
        held = self._open.get(number)
        replayed = held() if held is not None else None
        if replayed is None or replayed.is_over:
            self._open.pop(number, None)
            return False
        return True

    def end_recording(self) -> None:
        """The pass in which it was recorded is over: later ones replay it."""
        self.is_recording = False
        self._places.clear()
        self._sources.clear()
        for call in self.calls:
            call.forget_autograd()
            for place in (*call.made, *call.outputs, *filter(None, (*call.grad_places, *call.grads))):
                place.owner = place.source = None
        for gradient in self._gradients.values():
            gradient.place.owner = None

    # Forward

    def find(self, unit: TracedUnit, graph: TracedGraph, given: GivenInputs) -> RecordedCall | None:
        """Return the next recorded call of a unit's graph, if its inputs have the same form; None without one."""
        for number in range(self._next, len(self.calls)):
            call = self.calls[number]
            if call.unit is unit and call.graph is graph:
                if call.form == given.form:
                    return call
                graph.note_moved(given.differs(call.form))
                return None
        return None

    def record(self, unit: TracedUnit, graph: TracedGraph, given: GivenInputs) -> RecordedCall:
        """Record a call. Raises NotCaptured."""
        made = RecordedCall(unit, graph, given, number=len(self.calls), device=self.device)
        self._release_returned()
        made.spares = set(self._lent)
        made.record(given, place_of=self._place_of)
        self.calls.append(made)
        for place in made.outputs:
            self._places[place.pointer] = place
        for place, tensor in zip(made.inputs, given.tensors, strict=True):
            if place in made.made:
                # Other calls of this pass may be given the same tensor.
                self._sources.append(place)
                place.load(tensor, pass_number=self._pass_number)
        return made

    def _place_of(self, tensor: Tensor) -> StaticPlace | None:
        """Return the place where a tensor is, or was copied to in this pass."""
        place = self._places.get(tensor.data_ptr())
        if place is not None and place.owner is not None and place.fits(tensor):
            return place
        return next((place for place in self._sources if place.holds(tensor)), None)

    def replay(self, call: RecordedCall, given: GivenInputs) -> Outputs | None:
        """Replay a forward; return the call's results, or None if that is not possible now."""
        if not call.trains and not self._spared_by(call):
            return None
        if not call.load(call.inputs, given.tensors, pass_number=self._pass_number):
            return None
        self._next = call.number + 1
        self._replayed.append(call)
        random_state = self.device.random_state()
        call.forward.replay()
        call.draws = call.draws or self.device.random_state() != random_state
        call.write_back(given.inputs)
        for place in call.outputs:
            place.filled(pass_number=self._pass_number)
        if call.trains and any(call.differentiable):
            replayed = ReplayedCall(call, self, given=given.inputs, random_state=random_state)
            self._open[call.number] = weakref.ref(replayed)
            outputs: Sequence[Tensor] = replayed.apply()
        else:
            outputs = call.lend()
            if not call.trains:
                self._lent += call.outputs
        return call.returned(given.inputs, outputs)

    # Backward

    def replay_backward(
        self, call: RecordedCall, given: Sequence[Any], grads: Grads, *, edges: Edges
    ) -> list[Tensor | None] | None:
        """Replay or record the backward of a call; None if that is not possible.

        Of the gradients, those that autograd is to bring are returned; the unit has got the others.
        """
        can_replay = not any(self._alive(number) for number in list(self._open) if number > call.number)
        can_replay = can_replay and call.is_at_home(given)
        if can_replay and call.backward is None and self.is_recording:
            can_replay = self._record_backward(call, grads)
        can_replay = can_replay and call.backward is not None
        can_replay = can_replay and call.pattern == tuple(grad is not None for grad in grads)
        can_replay = can_replay and (self.is_recording or self._spared_by(call))
        if not can_replay or not call.load(call.grad_places, grads, pass_number=self._pass_number):
            self.num_computed += 1
            return None
        assert call.backward is not None
        call.backward.replay()
        places = list(call.grads)
        if not self.is_recording:
            # While it is recorded, later graphs get the memory of gradients as autograd gives it back.
            unit, params = call.unit, [given[number] for number in call.reached]
            handed = hand_over(places, params, edges, takers=unit.takers, grads=unit.unit.grads)
            self._handed += [(weakref.ref(gradients), own) for gradients, own in handed]
        left = [place for place in places if place is not None]
        for place in left:
            place.filled(pass_number=self._pass_number)
        self._lent += left
        return [None if place is None else place.lend() for place in places]

    def _record_backward(self, call: RecordedCall, grads: Grads) -> bool:
        self._release_returned()
        try:
            call.record_backward(grads, place_of=self._place_of, spares=set(self._lent))
        except NotCaptured as why:
            self.fail(call.graph, str(why))
            return False
        for place in call.grads:
            if place is not None:
                self._places[place.pointer] = place
        return True

    def fail(self, graph: TracedGraph, why: str) -> None:
        """Note that a graph could not be recorded; it is not tried again, unless it may have lacked a pass before."""
        self.failed = why
        if self.is_warm:
            graph.why_not = why

    def gradient(self, name: str, num_elements: int, *, dtype: torch.dtype) -> Tensor | None:
        """Return graph memory for an averaged gradient; None if it lies elsewhere (program/gradient_place.py), or if
        later graphs of this pass might write there.
        """
        if not self._places_gradients:
            return None
        found = self._gradients.get(name)
        if found is None:
            if not self.is_recording:
                return None
            place = self.device.place(self.device.allocate(num_elements, dtype=dtype))
            pending = {number for number in list(self._open) if self._alive(number)}
            found = self._gradients[name] = _GradientPlace(place=place, pending=pending, num_calls=len(self.calls))
        elif not self._can_hold(found):
            return None
        tensor = found.place.tensor
        return found.place.lend() if (tensor.numel(), tensor.dtype) == (num_elements, dtype) else None

    def _can_hold(self, gradient: "_GradientPlace") -> bool:
        """Return whether no graph that may still be replayed in this pass writes there, and nobody else uses it."""
        num_calls = len(self.calls) if self.is_recording else self._next
        if num_calls < gradient.num_calls or gradient.place.is_lent:
            return False
        return not any(self._alive(number) for number in list(self._open) if number not in gradient.pending)

    def end_call(self, call: RecordedCall) -> None:
        """The backward of a call is over: the memory of its outputs and inputs may be written."""
        self._open.pop(call.number, None)
        self._lent += call.outputs
        for place in call.made:
            # The tensor that was copied here may go.
            place.source = None
        if self.is_recording:
            for place in call.made:
                place.owner = None
                self._sources = [source for source in self._sources if source is not place]
            self._release_returned()

    def _release_returned(self) -> None:
        """Let later graphs have the memory of what is no longer held."""
        still = []
        for place in self._lent:
            if place.is_lent:
                still.append(place)
            else:
                place.owner = None
        self._lent = still

    def _spared_by(self, call: RecordedCall) -> bool:
        """Return whether a graph of the call leaves alone what code outside of the graphs still holds."""
        self._lent = [place for place in self._lent if place.is_lent]
        self._handed = [(held, places) for held, places in self._handed if held() is not None]
        in_use = (*self._lent, *(place for _, places in self._handed for place in places))
        return all(place in call.spares for place in in_use)

    def release(self) -> None:
        """Destroy the graphs."""
        self.end_recording()
        for call in self.calls:
            call.release()
        self.calls.clear()
