"""Matrix products in fp8, as the planner times them: the product, and the casts of its operands before it.

A weight of N × K and M rows of input:

    forward   y = x · wᵀ     the maximum of x is read and x is cast; so is w, unless it was gathered in fp8
    input     dx = dy · w    the same of dy; w is transposed (cast by its known scale, unless it was gathered in fp8)
    weight    dw = dyᵀ · x   the 8-bit dy and x of the other products are transposed

Under the rowwise recipe each product has its own casts, along its own rows and columns.

Bytes are counted, not fitted: 2 to read a maximum, 2 + 1 to cast, 1 + 1 to transpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.hardware.kernel_model import Kernel, product
from shardwise.plan import Plan
from shardwise.planner.ways import fp8_way
from shardwise.program.fp8_layers import is_fp8
from shardwise.spec import UnitSpec
from shardwise.spec.step import GATHERED, ROWWISE, TENSORWISE, Op

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

# The end of a product's role (hardware/probe.py).
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
