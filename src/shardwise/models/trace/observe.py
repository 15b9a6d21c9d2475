"""One forward, loss and backward under the recorder, with a mark at every row of the step program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.base.errors import InvalidModel, ShardwiseError
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from shardwise.engine.activations.recompute import recompute_unit
from shardwise.engine.core.precision import cast_inputs
from shardwise.engine.hooks.step_hooks import StepHooks
from shardwise.models.trace.compiled import compiled_units
from shardwise.models.trace.cut import CannotCutError, Skipper
from shardwise.models.trace.fake import COMPUTE_DTYPES, fake_batch, fake_model
from shardwise.models.trace.gpu_kernels import IN_FP32, SCRATCH, GpuKernels
from shardwise.models.trace.patch import replaced_forward
from shardwise.models.trace.recorder import OpRecorder, TraceEntry
from shardwise.models.trace.values import KnownValues, answers_as_eager
from shardwise.program.spec import NONE, ROOT, most_demanding
from shardwise.program.spec.step import (
    AFTER_FORWARD,
    BACKWARD_DONE,
    BEFORE_BACKWARD,
    BEFORE_FORWARD,
    COMPILED,
    GRADS_READY,
    Run,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    """A model, cut into units, and its loss."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any]
    units: Mapping[str, nn.Module]
    # Parameter → the unit that holds it.
    owners: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of computing: dtype, recomputation (for compiled units: COMPILED), and kernels of "cuda" or "cpu"."""

    computes_in: str = "bf16"
    recompute: str = "none"
    device: str = "cuda"

    @property
    def is_compiled(self) -> bool:
        return self.recompute in COMPILED.values()

    @property
    def eager(self) -> "Way":
        """The same with uncompiled units."""
        back = {compiled: eager for eager, compiled in COMPILED.items()}
        return replace(self, recompute=back.get(self.recompute, self.recompute))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """The record of a step, the order in which units were called, and the `backward` of each (spec.UnitSpec)."""

    entries: list[TraceEntry]
    calls: tuple[str, ...]
    backward: Mapping[str, str]
    batch_bytes: int


def observe(task: TracedTask, *, way: Way, batch_size: int, runs: Sequence[Run]) -> ObservedStep:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = KnownValues()
    recorder = OpRecorder(scratch=SCRATCH[way.device], in_fp32=IN_FP32[way.device], values=values)
    kernels = GpuKernels(recorder) if way.device == "cuda" else None
    skipper = Skipper(task.units, runs=runs)
    marks = _Marks(recorder, skipper=skipper)
    with ExitStack() as stack:
        stack.enter_context(fake_model(task.model, mode=mode, computes_in=way.computes_in, without=skipper.skipped))
        made = _made(task, batch_size)
        batch = fake_batch(made, mode=mode)
        values.know(batch, made)
        batch_bytes = _ignore_existing(task, batch, recorder=recorder)
        if way.is_compiled:
            inside = kernels.in_compiled_code if kernels is not None else nullcontext
            stack.enter_context(compiled_units(task.units, recorder=recorder, kernels=inside))
        stack.enter_context(_recomputing(task, how=way.eager.recompute))
        stack.enter_context(skipper.at_work())
        stack.enter_context(_casting(task.model, way=way))
        stack.enter_context(answers_as_eager())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(kernels or nullcontext())
        if way.recompute == "selective":
            # The first step learns what need not be saved.
            _run(task, batch, recorder=recorder)
            recorder.entries.clear()
        stack.enter_context(_hooks(task, marks=marks))
        _run(task, batch, recorder=recorder)
    return ObservedStep(
        entries=recorder.entries, calls=tuple(marks.calls), backward=marks.backward, batch_bytes=batch_bytes
    )


def _made(task: TracedTask, batch_size: int) -> Any:
    try:
        return task.make_batch(batch_size)
    except ShardwiseError:
        raise
    except Exception as error:  # anything from the user's function
        raise InvalidModel(f"{task.name}: make_batch({batch_size}): {_line(error)}") from error


def _run(task: TracedTask, batch: Any, *, recorder: OpRecorder) -> None:
    try:
        loss = task.loss(task.model, batch)
        recorder.in_backward = True
        _backward(loss)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidModel(
            f"{task.name} cannot be traced: {error.func} depends on the data; plan its states alone "
            "(params:N), or give make_batch and loss a form that avoids it"
        ) from error
    except (ShardwiseError, CannotCutError):
        raise
    except Exception as error:  # anything from the user's model
        raise InvalidModel(f"{task.name} cannot be traced: {_line(error)}") from error
    recorder.in_backward = False
    recorder.mark(BACKWARD_DONE, ROOT)
    for parameter in task.model.parameters():
        parameter.grad = None


def _backward(loss: Tensor) -> None:
    """Run loss.backward() with GPU kernels also in recomputation.

    A function mode is disabled inside the calls that it intercepts, and `Tensor.backward` is one of them.
    """
    if loss.numel() != 1:
        raise ValueError(f"the loss must be a scalar; it has the shape {tuple(loss.shape)}")
    torch_private.engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _ignore_existing(task: TracedTask, batch: Any, *, recorder: OpRecorder) -> int:
    """Exclude parameters, buffers and the batch from the record; return the bytes of the batch."""
    for parameter in task.model.parameters():
        recorder.ignore(parameter, is_weight=True)
    for buffer in task.model.buffers():
        recorder.ignore(buffer)
    storages: dict[int, int] = {}
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor):
            recorder.ignore(tensor)
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


class _Marks:
    """Marks the rows of a step when hooks report them. Units that are not traced are called, but have no rows."""

    in_backward = False

    def __init__(self, recorder: OpRecorder, *, skipper: Skipper) -> None:
        self.recorder = recorder
        self.skipper = skipper
        self.calls: list[str] = []
        # Traced unit → how it notices its backward.
        self.backward: dict[str, str] = {}

    def before_forward(self, unit: str) -> int:
        call = self.calls.count(unit)
        self.calls.append(unit)
        self._mark(BEFORE_FORWARD, unit, call)
        return call

    def awaits(self, unit: str) -> bool:
        return True

    def after_forward(self, unit: str, *, backward: str) -> None:
        self._mark(AFTER_FORWARD, unit, self.calls.count(unit) - 1)
        if not self.skipper.skips(unit):
            self.backward[unit] = most_demanding(backward, self.backward.get(unit, NONE))

    def begin_backward(self) -> None:
        self.in_backward = True

    def before_graph_of_grads(self) -> None: ...

    def before_backward(self, unit: str, call: int) -> None:
        self._mark(BEFORE_BACKWARD, unit, call)

    def grads_ready(self, unit: str) -> None:
        self._mark(GRADS_READY, unit, 0)

    def end_backward(self) -> None:
        self.in_backward = False

    def recompute(self, unit: str) -> None: ...

    def without_gradients(self, unit: str, *, begins: bool) -> None: ...

    def _mark(self, trigger: str, unit: str, call: int) -> None:
        if not self.skipper.skips(unit):
            self.recorder.mark(trigger, unit, call)


@contextmanager
def _hooks(task: TracedTask, *, marks: _Marks) -> Iterator[None]:
    def accumulated(unit: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        marks.recorder.accumulated(parameter.grad, unit=unit)

    hooks = StepHooks(task.units, listener=marks, on_grad=accumulated)
    hooks.attach()
    parameters = list(task.model.named_parameters())
    for unit, grads in hooks.grads.items():
        grads.expect([parameter for path, parameter in parameters if task.owners[path] == unit])
    try:
        yield
    finally:
        hooks.detach()


@contextmanager
def _casting(model: nn.Module, *, way: Way) -> Iterator[None]:
    """Cast inputs to the compute dtype as the engine does, or run the model (not its loss) under autocast."""
    dtype = COMPUTE_DTYPES[way.computes_in]
    context: Any = nullcontext()
    if way.computes_in == "autocast":
        context = replaced_forward(model, torch.autocast("cpu", dtype=torch.bfloat16))
    elif dtype is not None:
        context = model.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    with context:
        yield


@contextmanager
def _recomputing(task: TracedTask, *, how: str) -> Iterator[None]:
    """Inside, every unit but the root recomputes its forward in backward."""
    with ExitStack() as stack:
        for name, module in task.units.items():
            if name != ROOT and how != "none":
                stack.callback(recompute_unit(module, mode=how))
        yield
