"""A training step as CUDA graphs: forward, backward, collectives and update are launched by two calls.

    step = shardwise.capture(step, model, optimizer)     # step(batch) → loss: forward, backward, step, zero_grad
    for batch in batches:
        loss = step(batch)

A few ordinary steps come first: they learn the program, let libraries allocate their buffers, and show which values the
step reads and changes. Then one step is captured, and replayed from then on. A replay runs no Python.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.agreement import exchange
from shardwise.comm.host_group import HostGroup
from shardwise.comm.job_environment import capture_is_off
from shardwise.engine.captured.captured_step import CapturedStep
from shardwise.engine.captured.step_graphs import StepRecorder
from shardwise.engine.captured.step_memory import StepMemory
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.graphs.python_state import PythonState, foreign_hook
from shardwise.engine.graphs.step_device import StepDevice
from shardwise.engine.graphs.step_pool import StepPool, why_no_pool
from shardwise.engine.protocol import Step, Tell
from shardwise.engine.workspaces import take_workspaces
from shardwise.errors import InvalidPlan


def capture(
    step: Step,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    functions: Sequence[Callable[..., Any]] = (),
    tell: Tell | None = None,
) -> Step:
    """Return `step` as CUDA graphs, as the plan's `capture` says; `step` itself if it cannot be captured.

    `step(*inputs)` runs one complete step on tensors of the device, and may return tensors. The optimizer's learning
    rates become tensors on the device, so that replays follow a schedule; a change of another option, or a loaded
    state, captures again. `functions` are called by the step besides the model; their state belongs to the step's key.
    `tell` receives one line per decision, on rank 0 (default: warnings).
    """
    engine = engine_of(model)
    tell = tell or _warn
    why = _why_not(engine, model, optimizer)
    if why is not None:
        if why and dist.get_rank() == 0:
            tell(f"capture: ordinary steps, not captured: {why}")
        return step
    device = StepDevice(engine.device)
    with device.on_stream():
        take_workspaces(engine.device)
    memory = StepMemory(StepPool(device.stream), device=device, optimizer=optimizer)
    captured = CapturedStep(
        step,
        model=model,
        engine=engine,
        optimizer=optimizer,
        state=PythonState(model, functions=(step, *functions)),
        device=device,
        recorder=StepRecorder(engine, optimizer, stream=device.stream, memory=memory),
        memory=memory,
        group=HostGroup(),
        must=engine.core.followed.plan.capture == "on",
        tell=tell if dist.get_rank() == 0 else lambda line: None,
    )
    return _WithRates(captured, optimizer, engine=engine)  # type: ignore[return-value]


def _why_not(engine: Engine, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return why no step of this plan is captured ("": no reason to report); None if steps can be captured."""
    plan = engine.core.followed.plan
    if not plan.may_capture_steps or engine.device.type != "cuda":
        return ""
    # A variable may be set for one rank alone.
    if any(exchange(capture_is_off())):
        return ""
    why = plan.why_not_captured() or why_no_pool()
    if not why and "capturable" not in optimizer.defaults:
        why = f"{type(optimizer).__name__} has no option capturable, as AdamW has"
    if not why and plan.capture == "auto":
        why = _why_not_unasked(model)
    if why and plan.capture == "on":
        raise InvalidPlan(f"capture = 'on': {why}; set capture = 'auto' or 'off'")
    return why or None


def _why_not_unasked(model: nn.Module) -> str:
    """Return why capture = 'auto' does not capture a model that capture = 'on' would; "" if it does."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return (
            "it has modules that were compiled outside of the plan; set compile in the plan instead, or capture = 'on'"
        )
    hooked = foreign_hook(model)
    return f"{hooked} has a hook, which a replay would not call; set capture = 'on' to do without" if hooked else ""


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


class _WithRates:
    """A captured step whose optimizer has its step counts and learning rates on the device, where graphs read them."""

    def __init__(self, captured: CapturedStep, optimizer: Optimizer, *, engine: Engine) -> None:
        self._captured = captured
        self._optimizer = optimizer
        self._engine = engine
        self._device = engine.device
        self._rates: list[Tensor] = []

    def __call__(self, *inputs: Any) -> Any:
        # The CPU may update what another plan has moved to host memory, and has no use for rates on a GPU.
        if self._engine.core.setting.update_device is not None:
            self._settle()
        return self._captured(*inputs)

    @property
    def report(self) -> Any:
        return self._captured.report

    def _settle(self) -> None:
        """Copy rates that were set as numbers, and counts of a loaded state, to where the graph reads them."""
        groups = self._optimizer.param_groups
        for index, group in enumerate(groups):
            if index == len(self._rates):
                given = group["lr"]
                on_device = isinstance(given, Tensor) and given.device == self._device
                self._rates.append(given if on_device else torch.as_tensor(given, dtype=torch.float32).to(self._device))
            rate = group["lr"]
            if rate is not self._rates[index]:
                if isinstance(rate, Tensor) and rate.device == self._device:
                    self._rates[index] = rate
                else:
                    self._rates[index].fill_(float(rate))
                group["lr"] = self._rates[index]
            group["capturable"] = True
        for state in self._optimizer.state.values():
            counter = state.get("step")
            if isinstance(counter, Tensor) and counter.device != self._device:
                state["step"] = counter.to(self._device)
