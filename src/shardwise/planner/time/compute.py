"""The time of one operation on a device, and on the CPU that issues it. No torch here.

A matrix product in fp8 is timed as the product, and the casts of its operands before it.

A weight of N × K and M rows of input:

    forward   y = x · wᵀ     the maximum of x is read and x is cast; so is w, unless it was gathered in fp8
    input     dx = dy · w    the same of dy; w is transposed (cast by its known scale, unless it was gathered in fp8)
    weight    dw = dyᵀ · x   the 8-bit dy and x of the other products are transposed

Under the rowwise recipe each product has its own casts, along its own rows and columns.

Bytes are counted, not fitted: 2 to read a maximum, 2 + 1 to cast, 1 + 1 to transpose.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from shardwise.hardware import Device
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.hardware.kernel_model import Kernel, attention, product, strided
from shardwise.plan import Plan
from shardwise.planner.job import PRODUCTS
from shardwise.planner.time.queues import WorkSeconds
from shardwise.planner.ways import fp8_way
from shardwise.program.buffers import is_fp8
from shardwise.program.spec import UnitSpec
from shardwise.program.spec.step import GATHERED, ROWWISE, TENSORWISE, Op, Stream

CAST = "fp8_cast"

_MAXIMUM_AND_CAST, _CAST, _TRANSPOSE = 5.0, 3.0, 2.0

_BYTES: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        GATHERED: {
            "forward": (_MAXIMUM_AND_CAST, 0.0),
            "input": (_MAXIMUM_AND_CAST, _TRANSPOSE),
            "weight": (_TRANSPOSE, _TRANSPOSE),
        },
        TENSORWISE: {
            "forward": (_MAXIMUM_AND_CAST, _MAXIMUM_AND_CAST),
            "input": (_MAXIMUM_AND_CAST, _CAST),
            "weight": (_TRANSPOSE, _TRANSPOSE),
        },
        ROWWISE: dict.fromkeys(("forward", "input", "weight"), (_MAXIMUM_AND_CAST, _MAXIMUM_AND_CAST)),
    }
)
"""Way → product → bytes that casts move per element of its left and of its right operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """The weights of a unit that are multiplied in fp8, by shape, and how (StepTrace.computes_in)."""

    shapes: frozenset[tuple[int, ...]] = frozenset()
    way: str = ""


NO_FP8 = Fp8Weights()

# The end of a product's role (hardware/measuring/probe.py).
_SCALES = {ROWWISE: " rowwise"}


def fp8_weights(unit: UnitSpec, *, plan: Plan) -> Fp8Weights:
    """Return the weights of a unit that a plan multiplies in fp8."""
    way = fp8_way(unit, plan=plan)
    if not way:
        return NO_FP8
    shapes = frozenset(param.shape for param in unit.params if is_fp8(param, unit=unit.name, plan=plan))
    return Fp8Weights(shapes=shapes, way=way)


def fp8_kernels(op: Op, kernel: Kernel, *, weights: Fp8Weights) -> tuple[Kernel, ...]:
    """Return (the casts, the product) of a matrix product that is in fp8; nothing if it is not."""
    if not weights.shapes or kernel.name != "matmul" or len(op.dims) != 3:
        return ()
    count, m, n, k = kernel.sizes
    role = kernel.role.partition(" ")[0]
    shape = (round(m), round(n)) if role == "weight" else (round(n), round(k))
    if shape not in weights.shapes and shape[::-1] not in weights.shapes:
        return ()
    of_left, of_right = _BYTES[weights.way][role]
    cast_bytes = of_left * m * k + of_right * n * k
    # The operands have one byte per element, the result two.
    num_bytes = m * k + n * k + 2 * m * n
    return (
        Kernel(CAST, "", 0.0, cast_bytes, (max(cast_bytes, 1.0), 1.0)),
        product("fp8", (count, m, n, k), role=role + _SCALES.get(weights.way, ""), num_bytes=num_bytes),
    )


KERNELS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(PRODUCTS, "matmul"),
        **dict.fromkeys(("_log_softmax", "_softmax", "_safe_softmax"), "log_softmax"),
        **dict.fromkeys(("_log_softmax_backward_data", "_softmax_backward_data"), "log_softmax_backward"),
        **dict.fromkeys(("zeros", "ones", "zeros_like", "ones_like"), "fill"),
        "native_layer_norm": "layer_norm",
        "native_layer_norm_backward": "layer_norm_backward",
        "_fused_rms_norm": "rms_norm",
        "_fused_rms_norm_backward": "rms_norm_backward",
        "threshold_backward": "relu_backward",
        "native_batch_norm": "batch_norm",
        "native_batch_norm_backward": "batch_norm_backward",
        "max_pool2d_with_indices": "max_pool",
        "max_pool2d_with_indices_backward": "max_pool_backward",
        "nll_loss_forward": "nll_loss",
        "embedding_dense_backward": "embedding_backward",
        "native_dropout": "dropout",
        "native_dropout_backward": "dropout_backward",
        "_to_copy": "cast",
        "clone": "transpose",
        "sum": "column_sum",
    }
)
"""Operation → the kernel that calibrate measures for it, if the names differ."""

MOVED: Mapping[str, float] = MappingProxyType(
    {
        # The trace counts only what they write; forward reads as much, backward twice as much.
        "_fused_rms_norm": 2.0,
        "_fused_rms_norm_backward": 3.0,
        # Forward reads one value per row of its input; backward writes the complete gradient.
        "nll_loss_forward": 0.0,
        "nll_loss_backward": 0.5,
    }
)
"""Operation → bytes that it moves per byte that the trace counts (default 1)."""

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
"""Kernel → bytes that it reads and writes per column (or channel) at any batch: weight, bias and their gradients in 16
bits; for a batch norm weight, bias and statistics in fp32."""

_ALONE = ("matmul", "embedding", "embedding_backward", "column_sum", "max_pool", "max_pool_backward", CAST)
"""Kernels that a compiler does not fuse with their neighbours, in addition to those with floating-point operations."""

RECOMPUTE_ISSUES = 85.0
"""CPU time of recomputing a unit in addition to its operations, in issued operations: hooks on saved tensors, random
states. Fitted to benchmarks/results/step_times_h200.json: 1.8 ms per unit with our engine, 1.0 with torch's."""


def can_time(device: Device) -> bool:
    return device.memory_bytes_per_s is not None and device.fp32_flops_per_s is not None


def kernel_of(op: Op, *, batch: int, seq: int | None, precision: str, backward: bool = False) -> Kernel:
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
        # The bytes that do not grow with the batch exist once per column.
        columns = max(line.const / COLUMN_BYTES[name], 1.0)
    if name in ("embedding", "embedding_backward") and line.per_sample:
        # The trace counts the complete table, but only the rows that are looked up are read, or added to.
        num_bytes = 2.0 * line.per_sample * batch
    num_bytes *= MOVED.get(op.name, 1.0)
    # A batch norm is bound by its elements; its calibrated points are in bytes of 16-bit elements.
    size = num_bytes / 2 if name.startswith("batch_norm") and precision == "fp32" else num_bytes
    return Kernel(name, precision if num_flops else "", num_flops, num_bytes, (max(size, 1.0), columns))


def _convolution(name: str, dtype: str, *, num_flops: float, num_bytes: float, weight_bytes: float) -> Kernel:
    """Return a convolution of sizes (pixels of the output in the batch, elements of the weight, bytes per pixel).

    The bytes that do not grow with the batch are its weight and, in backward, the weight's gradient.
    """
    is_backward = name.endswith("_backward")
    weight = max(weight_bytes, 1.0) / (2 if dtype != "fp32" else 4) / (2 if is_backward else 1)
    pixels = max(num_flops / (2 * weight), 1.0)
    return Kernel(name, dtype, num_flops, num_bytes, (pixels, weight, max(num_bytes / pixels, 1.0)))


@lru_cache(maxsize=64)
def _issue_seconds(device: Device) -> Mapping[str, tuple[float, float]]:
    return kernel_model_of(device).calibration.launch_seconds


def launch_seconds(op: Op, *, backward: bool, device: Device, nodes_per_op: float = 1.0) -> float:
    """Return the CPU's time to issue one operation: in forward from Python, in backward from autograd.

    `nodes_per_op`: nodes of the autograd graph per operation of backward; the cost of a node counts once.
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
    fp8: Fp8Weights = NO_FP8,
) -> WorkSeconds:
    """Return the time of a stream's operations; the first `recomputed` ones are issued from Python in backward too.

    `nodes_per_op`: as for launch_seconds. `fuses`: compiled, so that a chain of memory-bound operations is one kernel.
    `fp8`: weights whose products are in fp8.
    """
    launch = kernel = span = 0.0
    model, other = kernel_model_of(device), _issue_seconds(device)["other"]
    works = (
        (launch_seconds(op, backward=by_autograd, device=device, nodes_per_op=nodes_per_op), done)
        for number, op in enumerate(stream.ops)
        for by_autograd in [backward and number >= recomputed]
        for kernel in [kernel_of(op, batch=batch, seq=seq, precision=precision, backward=by_autograd)]
        for done in fp8_kernels(op, kernel, weights=fp8) or (kernel,)
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
        # One after the other: the CPU issues and computes.
        return WorkSeconds(launch + kernel, 0.0, launch + kernel)
    return WorkSeconds(launch, kernel, span)


def _fused(works: Iterable[tuple[float, Kernel]], *, issue_seconds: float) -> Iterator[tuple[float, Kernel]]:
    """Yield the compiled kernels: each chain of memory-bound kernels is one pass over the memory of its largest.

    Generated code calls them, also in backward, so each takes the CPU as long as one call in forward.
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
    """Return how many operations at the start of a unit's backward repeat its forward."""
    count = 0
    for one, other in zip(forward.ops, backward.ops, strict=False):
        if one != other:
            break
        count += 1
    return count


def update_seconds(*, num_elements: int, num_tensors: int, optimizer: str, device: Device) -> tuple[float, float]:
    """Return (launch, kernel) of an optimizer's step."""
    model = kernel_model_of(device)
    known = model.calibration.update
    issue, more, bytes_each, reach = known.get(optimizer, known["adamw-fused"])
    kernel = num_elements * bytes_each / (model.memory_bytes_per_s * reach) + model.calibration.kernel_seconds
    launch = issue + more * num_tensors
    return (launch + kernel, 0.0) if device.name == "cpu" else (launch, kernel)


def copy_seconds(num_bytes_read_and_written: float, *, device: Device) -> float:
    """Return the time of a copy, cast or memset on the device."""
    num_bytes = max(float(num_bytes_read_and_written), 1.0)
    return kernel_model_of(device).seconds(Kernel("copy", "", 0.0, num_bytes, (num_bytes, 1.0)))
