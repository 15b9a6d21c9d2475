"""Measures the time of a probe's kernel on this device."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.hardware.measuring.probe import Probe

# Values in fp8 are drawn in bf16, and cast by their kernel.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

Call = Callable[[], Any]
NewTensor = Callable[..., Tensor]

# The number of calls per timing is chosen for this duration, up to _MOST_CALLS.
_AIM_SECONDS = 4e-3
_MOST_CALLS = 48
# About the last-level cache of a desktop CPU.
_CPU_CACHE_BYTES = 2**25
_NUM_TIMINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """A function of tensors, and the positions of those that require a gradient."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    differentiable: tuple[int, ...] = (0,)


class Stopwatch:
    """Times kernels of one device, on a separate stream: capture needs one, and autograd stays on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.cache_bytes = _CPU_CACHE_BYTES
        if device.type == "cuda":
            self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def fits(self, probe: Probe) -> bool:
        """Return whether a probe needs only a small part of the free memory."""
        return self.stream is None or 6 * probe.num_bytes < torch.cuda.mem_get_info(self.device)[0]

    def seconds(self, probe: Probe) -> float:
        """Return the median time of one call, without its launch on a GPU.

        If the probe is cold, calls alternate between sets of tensors that together exceed the device's cache.
        """
        if self.stream is None:
            return _cpu_seconds([_call(probe, device=self.device) for _ in range(self._num_sets(probe, most=4))])
        with torch.cuda.stream(self.stream):
            return _cuda_seconds([_call(probe, device=self.device) for _ in range(self._num_sets(probe, most=12))])

    def _num_sets(self, probe: Probe, *, most: int) -> int:
        if not probe.cold:
            return 1
        return max(1, min(most, -(-2 * self.cache_bytes // max(probe.num_bytes, 1))))


def kernel_of(probe: Probe, *, device: torch.device) -> MeasuredKernel:
    """Return the kernel of a probe, with new tensors."""

    def new(*shape: int) -> Tensor:
        # Random values: multiplying zeros takes less power, and so is faster.
        return torch.randn(shape, device=device, dtype=DTYPES[probe.dtype])

    return _KERNELS[probe.name.removesuffix("_backward")](probe, new)


def _call(probe: Probe, *, device: torch.device) -> Call:
    """Return a call of the kernel on new tensors."""
    kernel = kernel_of(probe, device=device)
    if not probe.is_backward:

        def forward() -> Any:
            with torch.no_grad():
                return kernel.function(*kernel.inputs)

        return forward
    wanted = [kernel.inputs[place].requires_grad_() for place in kernel.differentiable]
    out = kernel.function(*kernel.inputs)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def _cpu_seconds(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    now = cpu_clock()
    began = now()
    calls[0]()
    once = now() - began
    rounds = max(1, min(_MOST_CALLS, int(_AIM_SECONDS / max(once, 1e-7)))) // len(calls) + 1
    timings = []
    for _ in range(_NUM_TIMINGS):
        began = now()
        for _ in range(rounds):
            for call in calls:
                call()
        timings.append((now() - began) / (rounds * len(calls)))
    return statistics.median(timings)


def cpu_clock() -> Callable[[], float]:
    """Return the clock of this thread, which other programs do not disturb; with several threads the wall clock."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_seconds(calls: Sequence[Call]) -> float:
    """Time calls in one CUDA graph that is replayed back to back, so that the device never waits for the CPU."""
    stream = torch.cuda.current_stream()
    for call in (*calls[:2], calls[0]):
        call()
    once = _elapsed([calls[0]])[0]
    num_calls = max(len(calls), min(_MOST_CALLS, int(_AIM_SECONDS / max(once, 1e-7)) + 1))
    num_calls -= num_calls % len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(num_calls):
            calls[number % len(calls)]()
    timings = _elapsed([graph.replay] * (_NUM_TIMINGS + 1))[1:]
    graph.reset()
    return statistics.median(timings) / num_calls


def _elapsed(calls: Sequence[Call]) -> list[float]:
    """Return the device seconds of each of several calls that are issued back to back."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.current_stream().synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


# The kernels, as the models of the catalogue call them. `new` makes a random tensor of a shape in the probe's dtype.


def _matmul(probe: Probe, new: NewTensor) -> MeasuredKernel:
    m, n, k = probe.dims
    if probe.dtype == "fp8":
        return _fp8_matmul(probe, new)
    if probe.role == "forward":
        return MeasuredKernel(function=torch.addmm, inputs=(new(n), new(m, k), new(n, k).t()))
    left = new(m, k) if probe.role == "input" else new(k, m).t()
    return MeasuredKernel(function=torch.mm, inputs=(left, new(k, n)))


def _fp8_matmul(probe: Probe, new: NewTensor) -> MeasuredKernel:
    """A product as engine/fp8/linear.py calls it: rows of the left operand and columns of the right one lie end to end.

    Gradients are the left operand, in e5m2 if there is one scale per operand.
    """
    m, n, k = probe.dims
    role, _, is_rowwise = probe.role.partition(" ")
    fast = role == "forward"
    left = new(m, k).to(torch.float8_e4m3fn if fast or is_rowwise else torch.float8_e5m2)
    shapes = ((m, 1), (1, n)) if is_rowwise else ((), ())
    scale_a, scale_b = (torch.ones(shape, device=left.device) for shape in shapes)

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return torch._scaled_mm(
            left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return MeasuredKernel(function=multiply, inputs=(left, new(n, k).to(torch.float8_e4m3fn).t()))


def _attention(probe: Probe, new: NewTensor) -> MeasuredKernel:
    batch, heads, kv_heads, seq, width = probe.dims

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        causal = probe.role == "causal"
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=kv_heads != heads)

    inputs = tuple(new(batch, seq, count, width).transpose(1, 2) for count in (heads, kv_heads, kv_heads))
    return MeasuredKernel(function=attend, inputs=inputs, differentiable=(0, 1, 2))


def _convolution(probe: Probe, new: NewTensor) -> MeasuredKernel:
    batch, inputs, outputs, kernel, stride, image = probe.dims
    padding = 0 if kernel == stride else kernel // 2

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=padding)

    tensors = new(batch, inputs, image, image), new(outputs, inputs, kernel, kernel)
    return MeasuredKernel(function=convolve, inputs=tensors, differentiable=(1,) if inputs == 3 else (0, 1))


def _batch_norm(probe: Probe, new: NewTensor) -> MeasuredKernel:
    batch, channels, image = probe.dims
    x = new(batch, channels, image, image)
    weight, bias, mean, variance = (torch.ones(channels, device=x.device) for _ in range(4))

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, training=True)

    return MeasuredKernel(function=normalize, inputs=(x, weight, bias), differentiable=(0, 1, 2))


def _max_pool(probe: Probe, new: NewTensor) -> MeasuredKernel:
    batch, channels, image = probe.dims
    x = new(batch, channels, image, image)
    return MeasuredKernel(function=lambda x: F.max_pool2d(x, 3, stride=2, padding=1), inputs=(x,))


def _layer_norm(probe: Probe, new: NewTensor) -> MeasuredKernel:
    rows, columns = probe.dims
    return MeasuredKernel(
        function=lambda x, weight, bias: F.layer_norm(x, (columns,), weight, bias),
        inputs=(new(rows, columns), new(columns), new(columns)),
        differentiable=(0, 1, 2),
    )


def _rms_norm(probe: Probe, new: NewTensor) -> MeasuredKernel:
    rows, columns = probe.dims
    return MeasuredKernel(
        function=lambda x, weight: F.rms_norm(x, (columns,), weight, 1e-5),
        inputs=(new(rows, columns), new(columns)),
        differentiable=(0, 1),
    )


def _nll_loss(probe: Probe, new: NewTensor) -> MeasuredKernel:
    rows, columns = probe.dims
    scores = new(rows, columns)
    return MeasuredKernel(function=F.nll_loss, inputs=(scores, torch.randint(columns, (rows,), device=scores.device)))


def _embedding(probe: Probe, new: NewTensor) -> MeasuredKernel:
    rows, columns = probe.dims
    table = new(rows, columns)
    tokens = torch.randint(rows, (rows,), device=table.device)
    return MeasuredKernel(function=lambda table: F.embedding(tokens, table), inputs=(table,))


_HEADS = 4


def _transpose(probe: Probe, new: NewTensor) -> MeasuredKernel:
    """Copy the gradients of queries, keys and values, stored head by head, into one row per token."""
    rows, columns = probe.dims
    x = new(3, 1, _HEADS, rows // 3, columns // _HEADS)
    return MeasuredKernel(function=lambda x: x.permute(1, 3, 0, 2, 4).contiguous(), inputs=(x,))


def _stack(probe: Probe, new: NewTensor) -> MeasuredKernel:
    """Stack the same gradients, each with strided heads."""
    parts = tuple(_heads(probe, new, rows=probe.dims[0] // 3) for _ in range(3))
    return MeasuredKernel(function=lambda *parts: torch.stack(parts), inputs=parts)


def _narrow(probe: Probe, new: NewTensor) -> MeasuredKernel:
    return MeasuredKernel(function=lambda x: x.to(DTYPES[probe.dtype]), inputs=(new(*probe.dims).float(),))


def _cat(probe: Probe, new: NewTensor) -> MeasuredKernel:
    rows, columns = probe.dims
    halves = new(rows, columns // 2), new(rows, columns // 2)
    return MeasuredKernel(function=lambda *parts: torch.cat(parts, -1), inputs=halves)


def _strided(probe: Probe, new: NewTensor) -> MeasuredKernel:
    """Multiply strided heads by one value per token and position in a head."""
    rows, columns = probe.dims
    return MeasuredKernel(function=torch.mul, inputs=(_heads(probe, new, rows=rows), new(rows, columns // _HEADS)))


def _strided_cat(probe: Probe, new: NewTensor) -> MeasuredKernel:
    """Swap the halves of strided heads."""
    heads = _heads(probe, new, rows=probe.dims[0])
    return MeasuredKernel(function=lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), inputs=(heads,))


def _heads(probe: Probe, new: NewTensor, *, rows: int) -> Tensor:
    return new(1, rows, _HEADS, probe.dims[1] // _HEADS).transpose(1, 2)


def _plain(function: Callable[..., Any], *, num_inputs: int = 1) -> Callable[[Probe, NewTensor], MeasuredKernel]:
    """Make a kernel of a function of tensors of rows × columns."""
    return lambda probe, new: MeasuredKernel(
        function=function, inputs=tuple(new(*probe.dims) for _ in range(num_inputs))
    )


_KERNELS: dict[str, Callable[[Probe, NewTensor], MeasuredKernel]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "batch_norm": _batch_norm,
    "max_pool": _max_pool,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "nll_loss": _nll_loss,
    "embedding": _embedding,
    "transpose": _transpose,
    "stack": _stack,
    "narrow": _narrow,
    "cat": _cat,
    "strided": _strided,
    "strided_cat": _strided_cat,
    "copy": _plain(torch.clone),
    "fill": _plain(torch.zeros_like),
    "add": _plain(torch.add, num_inputs=2),
    "mul": _plain(torch.mul, num_inputs=2),
    "gelu": _plain(lambda x: F.gelu(x, approximate="tanh")),
    "silu": _plain(F.silu),
    "relu": _plain(F.relu),
    "dropout": _plain(lambda x: F.dropout(x, 0.1)),
    "widen": _plain(lambda x: x.float()),
    "column_sum": _plain(lambda x: x.sum(0)),
    "log_softmax": _plain(lambda x: F.log_softmax(x, -1)),
}
