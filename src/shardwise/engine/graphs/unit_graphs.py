"""Units as graphs: decides for each pass of a model whether its units run as ordinary, observed, recorded or replayed.

ordinary   a pass whose inputs have a form that was not seen often enough, or that nothing can be gained for
traced     each unit is traced (tracer.py), and what was traced runs in the ordinary way; its memory is observed. So
           are passes of all forms, until one traces nothing: the trace of a second form often is one of any form, and
           to run it for the first time next to graphs would need memory for both
recorded   each traced graph's forward is recorded as it is called, and its backward as autograd comes to it
replayed   later passes of the same form; a graph that differs from its recording runs in the ordinary way

While there are graphs, new forms are recorded at once, or the graphs make way (balance.py).

Ranks decide by themselves, because a unit does not communicate. Gathers, reduces and everything else between units are
those of an ordinary step. A pass that begins while another one still waits for its backward (two forwards per
backward) has graphs of its own, in other memory.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.vocabulary.tested_versions import installed_torch, untested_torch
from shardwise.comm.job.job_environment import capture_is_off
from shardwise.comm.job.leave import release_before_leaving
from shardwise.engine.activations.recompute import replace_forward
from shardwise.engine.core.core import Core
from shardwise.engine.graphs.arena import Arena, Arenas, ObservedMemory
from shardwise.engine.graphs.balance import Balance
from shardwise.engine.graphs.graph_device import FULL, CudaGraphs, GraphDevice
from shardwise.engine.graphs.graph_pool import why_no_pool
from shardwise.engine.graphs.pass_form import num_elements, shapes_of
from shardwise.engine.graphs.recorded_pass import RecordedPass
from shardwise.engine.graphs.reports import Reports, Tell
from shardwise.engine.graphs.slots import Slots
from shardwise.engine.graphs.traced_unit import TracedUnit, traced_unit
from shardwise.engine.graphs.tracer import Tracer
from shardwise.engine.graphs.unit_calls import Mode, UnitCalls
from shardwise.engine.optimizer.allocate import move_states
from shardwise.program.spec import ROOT, ModelSpec

# Ordinary passes of a form before it is recorded, while it is the only one and otherwise.
ENOUGH = (2, 6)
# Forms that are counted before counting begins again.
_MOST_COUNTED = 10_000
# Recordings of one form that may fail, and backwards of one that may be computed again, before it stays ordinary.
_MOST_FAILURES = 3
_MOST_COMPUTED = 8
# Traced passes before recordings begin, even if each has traced something.
_MOST_TRACED = 8
# Passes in a row with a graph that differs from its recording, after which a form is recorded again, and how often.
_MOST_MISSED = 4
_MOST_RENEWED = 3


class UnitGraphs:
    """The graphs of one model's units: `units` may have some, `calls` runs them (`num_calls`, `num_replayed`)."""

    def __init__(
        self,
        core: Core,
        *,
        make_device: Callable[[], GraphDevice],
        tell: Tell,
        slots: Slots | None = None,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self._core = core
        self._reports = Reports(tell)
        self.arenas = Arenas(make_device)
        self._slots = slots
        self._optimizers = optimizers
        self._spec: ModelSpec | None = None
        self.units: list[TracedUnit] = []
        self.calls = UnitCalls(self.arenas, reports=self._reports, release=self.release)
        self._tracers: dict[str, Tracer] = {}
        # Whether gradients lie in the memory of graphs: as long as none is there when a pass begins.
        self._places_gradients = True
        # Whether the optimizer's state has moved, before the first recording.
        self._moved_states = False
        self._inputs: tuple[Any, ...] = ()
        self._key: Any = None
        self._number = 0
        # The most elements of a pass with these graphs.
        self._widest = 0
        self._seen: Counter[Any] = Counter()
        self._failures: Counter[Any] = Counter()
        self._renewed: Counter[Any] = Counter()
        self._observed: dict[Any, ObservedMemory] = {}
        # Whether the last traced pass had only graphs that had run before; traced passes.
        self._traced_all = False
        self._num_traced = 0
        self._balance = Balance()
        release_before_leaving(self)

    def attach(self) -> list[Callable[[], None]]:
        """Take over the forwards of all units but the root and layers of it; return the functions that undo it."""
        core, undo = self._core, []
        for unit in core.units.values():
            if unit.name != ROOT and not unit.from_root and unit.flats and core.followed.plan.may_capture(unit.name):
                traced = traced_unit(unit, core=core, tracers=self._tracers)
                if not traced.why_not:
                    self.units.append(traced)
                    undo.append(replace_forward(unit.module, partial(self.calls.call, traced)))
        if not self.units:
            return []
        core.setting.gradient_memory.lie_in(self._gradient)
        hook = core.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True, prepend=True)
        begins, evaluates = partial(self._begin, True), partial(self._begin, False, True)
        core.setting.events.pass_begins.append(begins)
        core.setting.events.evaluation_begins.append(evaluates)
        core.setting.events.last_backward_begins.append(self._begin_backward)

        def detach() -> None:
            hook.remove()
            core.setting.gradient_memory.lie_in(None)
            core.setting.events.pass_begins.remove(begins)
            core.setting.events.evaluation_begins.remove(evaluates)
            core.setting.events.last_backward_begins.remove(self._begin_backward)
            self.release()
            self._leave_slots()

        return [*undo, detach]

    @property
    def num_calls(self) -> int:
        return self.calls.num_calls

    @property
    def num_replayed(self) -> int:
        return self.calls.num_replayed

    def release(self) -> None:
        """Destroy all graphs; later passes are recorded again."""
        self.calls.mode = Mode.ORDINARY
        self._widest = 0
        self.arenas.release()

    def renew(self) -> None:
        """Begin again: the model's parameters or modules have changed."""
        self.release()
        self._failures.clear()
        self._observed.clear()
        self._traced_all, self._num_traced = False, 0
        self._balance = Balance()
        self._moved_states = False
        self._renewed.clear()
        for unit in self.units:
            unit.renew()

    def _move_states(self) -> None:
        """Free memory of ordinary steps that could not be given back while optimizer state lies in it."""
        device, graphs = self._core.setting.device, self.arenas.all[0].device
        for optimizer in self._optimizers:
            move_states(optimizer, device=device, release_memory=graphs.release_memory)

    def _take_slots(self) -> None:
        """Gather at fixed addresses from now on, as the program of this spec needs them."""
        if self._slots is not None and self._spec is not self._core.followed.spec:
            self._spec = self._core.followed.spec
            self._slots.assign(self._core.units.values(), program=self._core.cursor.program)

    def _leave_slots(self) -> None:
        if self._slots is not None and self._spec is not None:
            self._slots.leave(self._core.units.values())
            self._spec = None

    # A pass

    def _note_inputs(self, model: nn.Module, inputs: Any, options: Any) -> None:
        self._inputs = (torch.is_inference_mode_enabled(), *shapes_of((inputs, options)))

    def _begin(self, trains: bool, learned: bool) -> None:
        """Begin a pass, and decide how its units run."""
        # There is one device, so a thread of its own gains nothing: bert-base takes 14.8 ms per step with one, and 13.1
        # without (H200).
        torch.autograd.set_multithreading_enabled(False)
        self._keep_gradients()
        self._end_recordings()
        self._note_pass()
        inputs, self._inputs = self._inputs, ()
        self._number += 1
        self.calls.mode, self.calls.recorded = Mode.ORDINARY, None
        self._key = key = (trains, inputs)
        if not learned or self._failures[key] >= _MOST_FAILURES:
            return
        self.arenas.note_kept()
        arena = self.arenas.free()
        if arena is not None and key in arena.passes:
            recorded = arena.passes[key]
            if recorded.num_computed > _MOST_COMPUTED:
                self._fail(key)
            elif recorded.num_missed < _MOST_MISSED or self._renewed[key] >= _MOST_RENEWED:
                self._take_slots()
                self._start(arena, recorded, Mode.REPLAYED)
                self._balance.note_replay()
                return
            else:
                self._renewed[key] += 1
            arena.remove(key)
        if self._balance.needs_all(key):
            self._drop()
        self._count(key)
        at_once = trains and self._records_at_once(num_elements(inputs))
        if not at_once and self.arenas.hold_graphs and self.arenas.all[0].device.free_share() < FULL:
            # An ordinary pass needs memory of its own.
            self.release()
        enough = self._balance.patience * ENOUGH[0 if len(self._seen) == 1 else 1]
        is_tracing = trains and bool(self._observed) and not self._traced_all
        if self._seen[key] <= enough and not (at_once or is_tracing):
            return
        self._take_slots()
        if key not in self._observed and at_once:
            self._observed[key] = self._scaled(num_elements(inputs))
        if key not in self._observed or is_tracing:
            self._observed[key] = ObservedMemory(begin_bytes=self.arenas.all[0].device.allocated_bytes())
            self.calls.mode, self.calls.observed = Mode.TRACED, self._observed[key]
        else:
            self._start_recording(key)

    def _records_at_once(self, size: int) -> bool:
        """Return whether a form that trains is recorded because there are graphs; drop these if it does not fit."""
        self._balance.most_elements = max(self._balance.most_elements, size)
        room = 0 if self._balance.needs_warm_up else self.arenas.room()
        if room and (size > room or not self._balance.pays):
            self._drop()
            return False
        # Observed memory is forgotten with a form that failed.
        return room > 0 and any(trains for trains, _ in self._observed)

    def _scaled(self, size: int) -> ObservedMemory:
        """Return what a pass of this size should need, from one that was observed."""
        observed = {num_elements(key[1]): memory for key, memory in self._observed.items() if key[0]}
        largest = max(observed)
        return observed[largest].scaled(size / largest)

    def _drop(self) -> None:
        """Destroy the graphs, because a pass needs their memory or they do not pay."""
        if self.arenas.hold_graphs:
            self._balance.note_drop()
            self.release()

    def _note_pass(self) -> None:
        """Note what the pass before this one has reserved, and whether it has traced anything."""
        if self.calls.mode is Mode.TRACED and self._key[0]:
            self._num_traced += 1
            is_new = self.calls.num_new or (len(self._seen) > 1 and len(self._observed) == 1)
            self._traced_all = not is_new or self._num_traced >= _MOST_TRACED
        self.calls.num_new = 0
        if self.calls.mode in (Mode.ORDINARY, Mode.TRACED):
            reserved_bytes = self.arenas.all[0].device.reserved_bytes()
            self._balance.note_ordinary(self._key, reserved_bytes, holds_graphs=self.arenas.hold_graphs)

    def _keep_gradients(self) -> None:
        """Have gradients elsewhere if they outlive their pass, as in an accumulation: graphs would overwrite them."""
        if not self._places_gradients:
            return
        if self.arenas.hold_graphs or self.calls.mode is Mode.RECORDED:
            outlive = any(arena.holds_gradients for arena in self.arenas.all)
        else:
            outlive = self._core.executor.holds_grads or any(flat.master.has_grads for flat in self._core.flats)
        if outlive:
            self._places_gradients = False
            self.release()

    def _gradient(self, name: str, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return graph memory for a gradient, where the current pass has some."""
        if self.calls.mode is Mode.TRACED:
            self._observed[self._key].gradient_bytes += num_elements * dtype.itemsize
        if self.calls.mode not in (Mode.RECORDED, Mode.REPLAYED) or not self._places_gradients:
            return None
        assert self.calls.recorded is not None
        return self.calls.recorded.gradient(name, num_elements, dtype=dtype)

    def _begin_backward(self) -> None:
        if self.calls.mode is Mode.TRACED:
            self._observed[self._key].begin_backward(self.arenas.all[0].device.allocated_bytes())

    def _count(self, key: Any) -> None:
        if len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen[key] += 1

    def _start_recording(self, key: Any) -> None:
        arena = self.arenas.free_or_new()
        if arena is None:
            return
        if not arena.device.has_room():
            self._fail(key)
            return
        trains, size = key[0], num_elements(key[1])
        if arena.passes and size > arena.room:
            arena = self.arenas.drop(arena)
        if not self._moved_states:
            # An update of states in host memory may still count its step.
            for beside in self._core.setting.beside:
                beside.join()
            self._move_states()
            self._moved_states = True
        largest = max(size, self._balance.most_elements) if trains else size
        recorded = arena.begin_recording(self._observed[key], trains=trains, size=size, largest=largest)
        recorded.is_warm = self._seen[key] > 1
        self._start(arena, recorded, Mode.RECORDED)
        self._balance.note_recording()

    def _start(self, arena: Arena, recorded: RecordedPass, mode: Mode) -> None:
        size = num_elements(self._key[1])
        if size > self._widest:
            # What is computed between units, such as logits, would lie beside the unused memory of smaller ones.
            if self._widest:
                arena.device.release_memory()
            self._widest = size
        self.calls.mode, self.calls.recorded = mode, recorded
        arena.current, arena.key = recorded, self._key
        recorded.begin(self._number)

    def _end_recordings(self) -> None:
        """Keep what earlier passes have recorded, once their backwards are over."""
        failed = False
        for arena in self.arenas.all:
            recorded = arena.current
            if recorded is None or not recorded.is_recording or not recorded.is_over():
                continue
            recorded.end_recording()
            if recorded.calls and not recorded.failed:
                arena.passes[arena.key] = recorded
                self._reports.graphs(self.units)
            else:
                self._fail(arena.key)
                self._reports.failure(self.units, recorded.failed)
                self._balance.needs_warm_up = self._balance.needs_warm_up or not recorded.is_warm
            failed = failed or bool(recorded.failed)
        if failed:
            # A failed capture has replaced the state of the random generator, which other graphs refer to.
            self.release()
        self.arenas.release_retired()

    def _fail(self, key: Any) -> None:
        self._failures[key] += 1
        self._seen[key] = 0
        self._observed.pop(key, None)


def unit_graphs_of(core: Core, *, optimizers: Iterable[Optimizer]) -> UnitGraphs | None:
    """Return the graphs of a model's units; None if its plan, its device or its environment does without."""
    plan, device = core.followed.plan, core.setting.device
    if device.type != "cuda" or not plan.captures or capture_is_off() or why_no_pool():
        return None
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    tell: Tell = (lambda line: warnings.warn(line, stacklevel=2)) if is_first else lambda line: None
    if untested_torch(installed_torch()):
        tell(f"capture: ordinary units, not CUDA graphs: the tracer of torch {installed_torch()} was not tried")
        return None
    return UnitGraphs(core, make_device=partial(CudaGraphs, device), tell=tell, slots=Slots(), optimizers=optimizers)
