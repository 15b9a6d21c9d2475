"""Observes an ordinary step: its reads, and the reasons why a captured one would not do the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.engine.core.inference_tensors import uncounted, versions
from shardwise.engine.core.step_events import heard_by
from shardwise.engine.engine import Engine
from shardwise.engine.graphs.compile_clock import CompileClock
from shardwise.engine.graphs.python_state import PythonState, generators
from shardwise.engine.graphs.reads import Read, noting_reads
from shardwise.engine.graphs.step_device import StepDevice
from shardwise.torch_internals.torch_private import NormBase

_GENERATORS = ("torch's", "Python's", "numpy's")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """Observations of one ordinary step.

    reads     the truth values that the step has read, in order; `early`: all before its last backward
    why_not   the reason against capturing it, in one line; "" if there is none
    written   tensors that it has written and that outlive it
    seconds   its time, with the device idle before and after
    compiled  torch.compile has compiled something in it, so that it does not describe other steps
    """

    reads: tuple[Read, ...]
    early: bool
    why_not: str
    written: tuple[Tensor, ...]
    seconds: float
    compiled: bool


class ProbedStep:
    """Runs one step, and sets `probe`."""

    def __init__(self, engine: Engine, *, state: PythonState, device: StepDevice) -> None:
        self._engine = engine
        self._state = state
        self._device = device
        self.probe: StepProbe

    def run(self, step: Callable[[], Any], *, leaves_grads: Callable[[], bool]) -> Any:
        values, drawn, offset = self._state.values(), generators(), self._device.random_offset()
        tensors = self._state.tensors()
        before = versions(tensors)
        events = self._engine.core.setting.events
        began = self._device.settled_seconds()
        with CompileClock() as clock, self._device.noting_waits() as waits, noting_reads(self._device.type) as noted:
            heard = (
                (events.last_backward_begins, noted.last_backward_begins),
                (events.gradients_asked, noted.passes_are_over),
            )
            with heard_by(*heard):
                result = step()
        seconds = self._device.settled_seconds() - began
        now = self._state.tensors()
        after = versions(now)
        replaced = [name for name in before if name not in after or before[name][0] != after[name][0]]
        statistics = self._statistics()
        written = [
            name
            for name in before
            if name not in replaced and (before[name] != after[name] or id(now[name]) in statistics)
        ]
        reasons = (
            uncounted(tensors),
            noted.unguarded,
            f"{waits[0]} waits for the device" if waits else "",
            _advanced(drawn),
            self._changed(values, replaced),
            self._on_host(written, now),
            self._random_recompute(offset),
            "the step leaves gradients behind: call optimizer.zero_grad() at its end" if leaves_grads() else "",
            "" if noted.passes_over else "the step does not call optimizer.step()",
        )
        self.probe = StepProbe(
            reads=tuple(noted.reads),
            early=noted.early,
            why_not=next(filter(None, reasons), ""),
            written=tuple(now[name] for name in written),
            seconds=seconds,
            compiled=clock.num_compiles > 0,
        )
        return result

    def _statistics(self) -> set[int]:
        """Return the ids of tensors that torch writes without counting: statistics of batch normalisation."""
        norms = [module for module in self._engine.core.model.modules() if isinstance(module, NormBase)]
        statistics = (tensor for norm in norms if norm.training for tensor in (norm.running_mean, norm.running_var))
        return {id(tensor) for tensor in statistics if tensor is not None}

    def _changed(self, values: tuple[Any, ...], replaced: list[str]) -> str:
        changed = self._state.changed(values) or (replaced[0] if replaced else "")
        return f"{changed} changes in Python in each step" if changed else ""

    def _on_host(self, written: list[str], tensors: dict[str, Tensor]) -> str:
        host = [name for name in written if tensors[name].device.type != self._device.type]
        return f"the step writes into {host[0]}, which lies in host memory" if host else ""

    def _random_recompute(self, offset: int) -> str:
        plan, units = self._engine.core.followed.plan, self._engine.core.units
        recomputes = bool(plan.tile) or any(plan.recompute_of(name) != "none" for name in units)
        if not recomputes or self._device.random_offset() == offset:
            return ""
        return "a captured recomputation cannot draw the same random numbers again (recompute or tile with dropout)"


def _advanced(before: tuple[Any, ...]) -> str:
    for name, old, new in zip(_GENERATORS, before, generators(), strict=True):
        if old != new:
            return f"the step draws random numbers from {name} generator on the CPU (layerdrop?)"
    return ""
