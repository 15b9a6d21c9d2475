"""Matrix products in fp8, as the planner times them: the product, and the casts of its operands before it.

A weight of N × K and M rows of input:

    forward   y = x · wᵀ     the maximum of x is read and x is cast; so is w, unless it was gathered in fp8
    input     dx = dy · w    the same of dy; w is transposed (cast by its known scale, unless it was gathered in fp8)
    weight    dw = dyᵀ · x   the 8-bit dy and x of the other products are transposed

Bytes are counted, not fitted: 2 to read a maximum, 2 + 1 to cast, 1 + 1 to transpose.
"""

from dataclasses import dataclass

from shardwise.hardware.kernel_model import Kernel, product
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program.buffers import num_fp8
from shardwise.program.fp8_layers import is_fp8
from shardwise.spec import UnitSpec
from shardwise.spec.step import Op

CAST = "fp8_cast"

_MAXIMUM_AND_CAST, _CAST, _TRANSPOSE = 5.0, 3.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """The weights of a unit that are multiplied in fp8, by shape; whether they are gathered so."""

    shapes: frozenset[tuple[int, ...]] = frozenset()
    gathered: bool = False


NO_FP8 = Fp8Weights()


def fp8_weights(unit: UnitSpec, *, plan: Plan, placement: Placement) -> Fp8Weights:
    """Return the weights of a unit that a plan multiplies in fp8."""
    if not plan.has_fp8:
        return NO_FP8
    shapes = frozenset(param.shape for param in unit.params if is_fp8(param, unit=unit.name, plan=plan))
    return Fp8Weights(shapes=shapes, gathered=placement.params is SHARDED and num_fp8(unit, plan=plan) > 0)


def fp8_kernels(op: Op, kernel: Kernel, *, weights: Fp8Weights) -> tuple[Kernel, ...]:
    """Return (the casts, the product) of a matrix product that is in fp8; nothing if it is not."""
    if not weights.shapes or kernel.name != "matmul" or len(op.dims) != 3:
        return ()
    count, m, n, k = kernel.sizes
    role = kernel.role.partition(" ")[0]
    shape = (round(m), round(n)) if role == "weight" else (round(n), round(k))
    if shape not in weights.shapes and shape[::-1] not in weights.shapes:
        return ()
    if role == "weight":
        cast_bytes = _TRANSPOSE * k * (m + n)
    else:
        of_weight = _MAXIMUM_AND_CAST if role == "forward" else _CAST
        if weights.gathered:
            of_weight = 0.0 if role == "forward" else _TRANSPOSE
        cast_bytes = _MAXIMUM_AND_CAST * m * k + of_weight * n * k
    # The operands have one byte per element, the result two.
    num_bytes = m * k + n * k + 2 * m * n
    return (
        Kernel(CAST, "", 0.0, cast_bytes, (max(cast_bytes, 1.0), 1.0)),
        product("fp8", (count, m, n, k), role=role, num_bytes=num_bytes),
    )
