"""Dtypes by torch's own names: their sizes, and the ones that compute, are stepped and sum. No torch here."""

from collections.abc import Mapping
from types import MappingProxyType

BYTES_PER_ELEMENT: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "complex64": 8,
        "complex128": 16,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
)
"""Precision of a plan → dtype in which units compute; under fp8, what their linear layers do not multiply."""


def is_floating_point(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def has_gradients(dtype: str) -> bool:
    """Return whether a parameter of this dtype can be trained."""
    return is_floating_point(dtype) or dtype.startswith("complex")


def compute_dtype(own: str, *, precision: str, keep_fp32: bool) -> str:
    """Return the dtype in which a parameter of dtype `own` computes; only floating-point dtypes change."""
    if precision == "native" or not is_floating_point(own):
        return own
    return "float32" if keep_fp32 else PRECISIONS[precision]


def master_dtype(own: str, *, precision: str) -> str:
    """Return the dtype that the optimizer steps."""
    return own if precision == "native" or not is_floating_point(own) else "float32"


def reduce_dtype(master: str, *, planned: str) -> str:
    """Return the dtype of gradient sums: the plan's choice, but never narrower than float64 or complex parameters."""
    return master if BYTES_PER_ELEMENT[master] > 4 else PRECISIONS[planned]
