"""One forward, loss and backward under the recorder, with a mark wherever the step program has a row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.activations.recompute import recompute_unit
from shardwise.errors import InvalidModel, ShardwiseError
from shardwise.spec import ROOT
from shardwise.spec.step import AFTER_FORWARD, BACKWARD_DONE, BEFORE_BACKWARD, BEFORE_FORWARD, GRADS_READY, Run
from shardwise.trace.cut import CannotCutError, Skipper
from shardwise.trace.fake import COMPUTE_DTYPES, fake_batch, fake_model
from shardwise.trace.gpu_kernels import IN_FP32, SCRATCH, GpuKernels
from shardwise.trace.patch import replaced_forward
from shardwise.trace.recorder import OpRecorder, TraceEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    """What is traced: a model and its loss, cut into units."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any]
    units: Mapping[str, nn.Module]
    # Parameter → the unit that holds it.
    owners: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How it computes: dtype, recomputation, and whose kernels run ("cuda" or "cpu")."""

    computes_in: str = "bf16"
    recompute: str = "none"
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """The record of a step, and the order in which units were called."""

    entries: list[TraceEntry]
    calls: tuple[str, ...]
    batch_bytes: int


def observe(subject: TracedTask, *, way: Way, batch_size: int, runs: Sequence[Run]) -> ObservedStep:
    """Run a step on fake tensors and record it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = OpRecorder(scratch=SCRATCH[way.device], in_fp32=IN_FP32[way.device])
    kernels = GpuKernels(recorder) if way.device == "cuda" else nullcontext()
    skipper = Skipper(subject.units, runs=runs)
    calls: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(fake_model(subject.model, mode=mode, computes_in=way.computes_in, without=skipper.skipped))
        batch = fake_batch(_made(subject, batch_size), mode=mode)
        batch_bytes = _ignore_what_is_there(subject, batch, recorder=recorder)
        stack.enter_context(_recomputing(subject, how=way.recompute, kernels=kernels))
        stack.enter_context(skipper.at_work())
        stack.enter_context(_casting(subject.model, way=way))
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(kernels)
        if way.recompute == "selective":
            # The first step learns what need not be kept.
            _run(subject, batch, recorder=recorder)
            recorder.entries.clear()
        stack.enter_context(_hooks(subject, recorder=recorder, skipper=skipper, calls=calls))
        _run(subject, batch, recorder=recorder)
    return ObservedStep(entries=recorder.entries, calls=tuple(calls), batch_bytes=batch_bytes)


def _made(subject: TracedTask, batch_size: int) -> Any:
    try:
        return subject.make_batch(batch_size)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever the user's own function raises
        raise InvalidModel(f"{subject.name}: make_batch({batch_size}): {_line(error)}") from error


def _run(subject: TracedTask, batch: Any, *, recorder: OpRecorder) -> None:
    try:
        loss = subject.loss(subject.model, batch)
        recorder.in_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidModel(
            f"{subject.name} cannot be traced: {error.func} depends on the data; plan its states alone "
            "(params:N), or give make_batch and loss a form that avoids it"
        ) from error
    except (ShardwiseError, CannotCutError):
        raise
    except Exception as error:  # whatever the user's own model raises
        raise InvalidModel(f"{subject.name} cannot be traced: {_line(error)}") from error
    recorder.in_backward = False
    recorder.mark(BACKWARD_DONE, ROOT)
    for parameter in subject.model.parameters():
        parameter.grad = None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _ignore_what_is_there(subject: TracedTask, batch: Any, *, recorder: OpRecorder) -> int:
    """Parameters, buffers and the batch are not born in the step; the bytes of the batch."""
    for parameter in subject.model.parameters():
        recorder.ignore(parameter, is_weight=True)
    for buffer in subject.model.buffers():
        recorder.ignore(buffer)
    storages: dict[int, int] = {}
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor):
            recorder.ignore(tensor)
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@contextmanager
def _hooks(subject: TracedTask, *, recorder: OpRecorder, skipper: Skipper, calls: list[str]) -> Iterator[None]:
    handles: list[Any] = []
    counts: dict[str, int] = {}
    begun: set[tuple[str, int]] = set()
    waiting: dict[str, int] = {}

    def before_forward(name: str, module: nn.Module, inputs: Any) -> None:
        if recorder.in_backward:
            return
        calls.append(name)
        if not skipper.skips(name):
            counts[name] = counts.get(name, -1) + 1
            recorder.mark(BEFORE_FORWARD, name, counts[name])

    def after_forward(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if recorder.in_backward or skipper.skips(name):
            return
        call = counts[name]
        recorder.mark(AFTER_FORWARD, name, call)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(before_backward, name, call))  # type: ignore[no-untyped-call]

    def before_backward(name: str, call: int, grad: Tensor) -> None:
        if (name, call) not in begun:
            begun.add((name, call))
            recorder.mark(BEFORE_BACKWARD, name, call)

    def grad_arrived(unit: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.accumulated(parameter.grad, unit=unit)
        waiting[unit] -= 1
        if not waiting[unit]:
            recorder.mark(GRADS_READY, unit)

    for name, module in subject.units.items():
        handles.append(module.register_forward_pre_hook(partial(before_forward, name), prepend=True))
        handles.append(module.register_forward_hook(partial(after_forward, name)))
    for path, parameter in subject.model.named_parameters():
        if parameter.requires_grad:
            unit = subject.owners[path]
            waiting[unit] = waiting.get(unit, 0) + 1
            hook = partial(grad_arrived, unit)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _casting(model: nn.Module, *, way: Way) -> Iterator[None]:
    """Inputs in the dtype that computes, as the engine casts them; or the model, but not its loss, under autocast."""
    dtype = COMPUTE_DTYPES[way.computes_in]
    context: Any = nullcontext()
    if way.computes_in == "autocast":
        context = replaced_forward(model, torch.autocast("cpu", dtype=torch.bfloat16))
    elif dtype is not None:
        context = model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    with context:
        yield


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, options: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, (inputs, options))


@contextmanager
def _recomputing(subject: TracedTask, *, how: str, kernels: AbstractContextManager[Any]) -> Iterator[None]:
    """Every unit but the root runs its forward again in backward, where `kernels` would be off if it did not ask."""

    def with_kernels(forward: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any, **options: Any) -> Any:
            with kernels:
                return forward(*args, **options)

        return again

    with ExitStack() as stack:
        for name, module in subject.units.items():
            if name != ROOT and how != "none":
                stack.enter_context(replaced_forward(module, with_kernels))
                stack.callback(recompute_unit(module, mode=how))
        yield
