"""The time of Muon's update of a matrix: a few passes over its memory, and matrix products. No torch here.

The update is the orthogonal matrix closest to the momentum, by a Newton–Schulz iteration in bf16. Each iteration of a
matrix X of m × n elements, m the shorter side, is A = X·Xᵀ, B = b·A + c·A², X ← a·X + B·X (Jordan et al. 2024):
products of 2·m²·n, 2·m³ and 2·m²·n operations.
"""

from collections.abc import Sequence

from shardwise.hardware import Device
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.hardware.kernel_model import product
from shardwise.planner.time.compute import copy_seconds
from shardwise.planner.whole_matrices import WholeMatrix

# torch's default.
_ITERATIONS = 5
# Momentum, its average with the gradient, a cast, a norm and its bound, a division; decay and the step itself.
_NUM_PASSES = 8
# Bytes that these read and write per element in fp32 and bf16: 12 + 12 + 6 + 2 + 4, 8 + 10.
_BYTES_PER_ELEMENT = 54
_BF16_BYTES = 2


def muon_seconds(matrices: Sequence[WholeMatrix], *, device: Device) -> tuple[float, float]:
    """Return (launch, kernel) of the update of these matrices, one after the other."""
    issue = kernel_model_of(device).calibration.launch_seconds["other"][0]
    launch = len(matrices) * (_NUM_PASSES + 3 * _ITERATIONS) * issue
    kernel = sum(_kernel_seconds(matrix.param.shape, device=device) for matrix in matrices)
    return (launch + kernel, 0.0) if device.name == "cpu" else (launch, kernel)


def _kernel_seconds(shape: tuple[int, ...], *, device: Device) -> float:
    short, long = min(shape), max(shape)
    # Rows, columns and inner side of an iteration's products.
    sides = (short, short, long), (short, short, short), (short, long, short)
    products = sum(_product_seconds(*one, device=device) for one in sides)
    # The summand of a product is first copied into the result.
    added = 2 * _BF16_BYTES * (short * short + short * long)
    moved = _BYTES_PER_ELEMENT * short * long + _ITERATIONS * added
    start = (_NUM_PASSES - 1) * kernel_model_of(device).calibration.kernel_seconds
    return _ITERATIONS * products + copy_seconds(moved, device=device) + start


def _product_seconds(rows: int, columns: int, inner: int, *, device: Device) -> float:
    num_bytes = _BF16_BYTES * (rows * inner + inner * columns + rows * columns)
    sizes = (1.0, float(rows), float(columns), float(inner))
    return kernel_model_of(device).seconds(product("bf16", sizes, role="forward", num_bytes=float(num_bytes)))
