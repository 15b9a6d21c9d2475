"""How long one operation takes on one device: on the device itself, and on the CPU that issues it. No torch here."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from shardwise.hardware import Device
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.hardware.kernel_model import Kernel, attention, product, strided
from shardwise.spec.step import Op, Stream

KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "mm": "matmul",
        "addmm": "matmul",
        "bmm": "matmul",
        "baddbmm": "matmul",
        "native_layer_norm": "layer_norm",
        "native_layer_norm_backward": "layer_norm_backward",
        "_fused_rms_norm": "rms_norm",
        "_fused_rms_norm_backward": "rms_norm_backward",
        "threshold_backward": "relu_backward",
        "native_batch_norm": "batch_norm",
        "native_batch_norm_backward": "batch_norm_backward",
        "max_pool2d_with_indices": "max_pool",
        "max_pool2d_with_indices_backward": "max_pool_backward",
        "_log_softmax": "log_softmax",
        "_log_softmax_backward_data": "log_softmax_backward",
        "_softmax": "log_softmax",
        "_safe_softmax": "log_softmax",
        "_softmax_backward_data": "log_softmax_backward",
        "nll_loss_forward": "nll_loss",
        "embedding_dense_backward": "embedding_backward",
        "native_dropout": "dropout",
        "native_dropout_backward": "dropout_backward",
        "_to_copy": "cast",
        "clone": "transpose",
        "sum": "column_sum",
        "zeros": "fill",
        "ones": "fill",
        "zeros_like": "fill",
        "ones_like": "fill",
    }
)
"""Operation → the kernel that calibrate measures for it, where the names differ."""

MOVED: Mapping[str, float] = MappingProxyType(
    {
        # The trace counts what they write; they read as much, and twice as much.
        "_fused_rms_norm": 2.0,
        "_fused_rms_norm_backward": 3.0,
        # One value a row is read of what is given; all of the gradient is written.
        "nll_loss_forward": 0.0,
        "nll_loss_backward": 0.5,
    }
)
"""Operation → bytes that move, for each that the trace counts, where that is not 1."""

COLUMN_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "layer_norm": 4.0,
        "layer_norm_backward": 8.0,
        "rms_norm_backward": 2.0,
        "column_sum": 2.0,
        "batch_norm": 20.0,
        "batch_norm_backward": 24.0,
    }
)
"""Kernel → bytes that it reads and writes for each column (or channel) whatever the batch: in 16 bits its weight, bias
and their gradients, in fp32 a batch norm's weight, bias and statistics."""

_ALONE = ("matmul", "embedding", "embedding_backward", "column_sum", "max_pool", "max_pool_backward")
"""Kernels that a compiler does not fuse with what comes before or after; nor does it those that count operations."""

RECOMPUTE_ISSUES = 85.0
"""What recomputing a unit costs the CPU in addition to its operations (so many more to issue): hooks on what is saved,
and states of random numbers. Fitted to benchmarks/results/step_times_h200.json: 1.8 ms per unit with our engine, 1.0
with torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSeconds:
    """A stream of operations, issued by a CPU to a device that works through them in order.

    launch   the CPU has issued all of them
    kernel   the device has done all of them, if the CPU was far ahead
    span     from the issue of the first to the end of the last, on a device that had nothing to do
    """

    launch: float = 0.0
    kernel: float = 0.0
    span: float = 0.0

    def then(self, other: "StreamSeconds") -> "StreamSeconds":
        """Both, one after the other."""
        return StreamSeconds(
            launch=self.launch + other.launch,
            kernel=self.kernel + other.kernel,
            span=max(self.span + other.kernel, self.launch + other.span),
        )


def can_time(device: Device) -> bool:
    """Whether enough is known of a device."""
    return device.memory_bytes_per_s is not None and device.fp32_flops_per_s is not None


def op_seconds(op: Op, *, batch: int, seq: int | None, precision: str, device: Device, backward: bool = False) -> float:
    """Time of one operation on the device."""
    return kernel_model_of(device).seconds(kernel_of(op, batch=batch, seq=seq, precision=precision, backward=backward))


def kernel_of(op: Op, *, batch: int, seq: int | None, precision: str, backward: bool = False) -> Kernel:
    """The kernel that does an operation."""
    num_flops, line = float(op.num_flops.at(batch=batch, seq=seq)), op.num_bytes.line(seq)
    num_bytes = float(line.at(batch))
    name = KERNELS.get(op.name, op.name)
    dims = tuple(float(dim.at(batch=batch, seq=seq)) for dim in op.dims)
    if name == "matmul":
        role = "weight" if any(op.dims[-1].terms[3:]) else "input" if backward else "forward"
        return product(precision, dims if len(dims) == 4 else (1.0, *dims), role=role, num_bytes=num_bytes)
    if name.startswith("_scaled_dot_product") and dims:
        is_backward = name.endswith("_backward")
        return attention(precision, dims, backward=is_backward, num_flops=num_flops, num_bytes=num_bytes)
    if name.startswith("convolution") and num_flops:
        return _convolution(name, precision, num_flops=num_flops, num_bytes=num_bytes, weight_bytes=line.const)
    if dims:
        return strided(name, dims[0], num_bytes=num_bytes)
    columns = 1.0
    if name in COLUMN_BYTES:
        # What does not grow with the batch is there once a column.
        columns = max(line.const / COLUMN_BYTES[name], 1.0)
    if name in ("embedding", "embedding_backward") and line.per_sample:
        # Of the table, which counts as a whole, only the rows that are looked up are read, or added to.
        num_bytes = 2.0 * line.per_sample * batch
    num_bytes *= MOVED.get(op.name, 1.0)
    # A batch norm is bound by its elements, and found among those that were measured by their bytes in 16 bits.
    size = num_bytes / 2 if name.startswith("batch_norm") and precision == "fp32" else num_bytes
    return Kernel(name, precision if num_flops else "", num_flops, num_bytes, (max(size, 1.0), columns))


def _convolution(name: str, dtype: str, *, num_flops: float, num_bytes: float, weight_bytes: float) -> Kernel:
    """Its sizes: pixels of the output in the batch, elements of the weight, bytes a pixel.

    Its weight is what does not grow with the batch; in backward its gradient as well.
    """
    is_backward = name.endswith("_backward")
    weight = max(weight_bytes, 1.0) / (2 if dtype != "fp32" else 4) / (2 if is_backward else 1)
    pixels = max(num_flops / (2 * weight), 1.0)
    return Kernel(name, dtype, num_flops, num_bytes, (pixels, weight, max(num_bytes / pixels, 1.0)))


@lru_cache(maxsize=64)
def _issue_seconds(device: Device) -> Mapping[str, tuple[float, float]]:
    return kernel_model_of(device).calibration.launch_seconds


def launch_seconds(op: Op, *, backward: bool, device: Device, nodes_per_op: float = 1.0) -> float:
    """Time of the CPU to issue one operation: in forward by Python, in backward by autograd.

    `nodes_per_op`: of autograd's graph, in backward; a node that issues several operations is paid for once.
    """
    known = _issue_seconds(device)
    if op.name in known:
        return known[op.name][1 if backward else 0]
    if not backward:
        return known["other"][0]
    return known["other"][1] + nodes_per_op * known.get("node", (0.0, 0.0))[1]


def stream_seconds(
    stream: Stream,
    *,
    batch: int,
    seq: int | None,
    precision: str,
    device: Device,
    backward: bool,
    recomputed: int = 0,
    fuses: bool = False,
    nodes_per_op: float = 1.0,
) -> StreamSeconds:
    """All operations of a stream; its first `recomputed` ones are issued by Python also in backward.

    `nodes_per_op`: as for launch_seconds.
    `fuses`: they are compiled, so that a chain of operations that memory bounds is one kernel.
    """
    launch = kernel = span = 0.0
    model, other = kernel_model_of(device), _issue_seconds(device)["other"]
    works = (
        (
            launch_seconds(op, backward=by_autograd, device=device, nodes_per_op=nodes_per_op),
            kernel_of(op, batch=batch, seq=seq, precision=precision, backward=by_autograd),
        )
        for number, op in enumerate(stream.ops)
        for by_autograd in [backward and number >= recomputed]
    )
    for issued, done in _fused(works, issue_seconds=other[0]) if fuses else works:
        seconds = model.seconds(done)
        launch += issued
        kernel += seconds
        span = max(span, launch) + seconds
    if recomputed and not fuses:
        again = RECOMPUTE_ISSUES * other[0]
        launch, span = launch + again, span + again
    if device.name == "cpu":
        # One after the other: there is nothing that works while the CPU issues.
        return StreamSeconds(launch=launch + kernel, kernel=0.0, span=launch + kernel)
    return StreamSeconds(launch=launch, kernel=kernel, span=span)


def _fused(works: Iterable[tuple[float, Kernel]], *, issue_seconds: float) -> Iterator[tuple[float, Kernel]]:
    """The same, compiled: each chain of kernels that memory bounds is one pass over the memory of its largest.

    What calls the kernels is generated code, in backward too, so each costs the CPU what one call in forward does.
    """
    largest: Kernel | None = None
    for _, kernel in works:
        if kernel.num_flops or kernel.name in _ALONE:
            if largest is not None:
                yield issue_seconds, _one_pass(largest)
                largest = None
            yield issue_seconds, kernel
        elif largest is None or kernel.num_bytes > largest.num_bytes:
            largest = kernel
    if largest is not None:
        yield issue_seconds, _one_pass(largest)


def _one_pass(kernel: Kernel) -> Kernel:
    return Kernel("add", "", 0.0, kernel.num_bytes, (max(kernel.num_bytes, 1.0), 1.0))


def num_recomputed(forward: Stream, backward: Stream) -> int:
    """How many operations at the beginning of a unit's backward are its forward once more."""
    count = 0
    for one, other in zip(forward.ops, backward.ops, strict=False):
        if one != other:
            break
        count += 1
    return count


def update_seconds(*, num_elements: int, num_tensors: int, optimizer: str, device: Device) -> tuple[float, float]:
    """(launch, kernel) of an optimizer's step over so many elements in so many tensors."""
    model = kernel_model_of(device)
    known = model.calibration.update
    issue, more, bytes_each, reach = known.get(optimizer, known["adamw-fused"])
    kernel = num_elements * bytes_each / (model.memory_bytes_per_s * reach) + model.calibration.kernel_seconds
    launch = issue + more * num_tensors
    return (launch + kernel, 0.0) if device.name == "cpu" else (launch, kernel)


def copy_seconds(num_bytes_read_and_written: float, *, device: Device) -> float:
    """Time of a copy, cast or memset on the device."""
    num_bytes = max(float(num_bytes_read_and_written), 1.0)
    return kernel_model_of(device).seconds(Kernel("copy", "", 0.0, num_bytes, (num_bytes, 1.0)))
