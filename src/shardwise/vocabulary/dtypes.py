"""Dtypes by torch's own names: how large each is, and which one computes, is stepped and sums. No torch here."""

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

PRECISIONS: Mapping[str, str] = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
"""A plan's words → dtypes."""


def is_floating_point(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def has_gradients(dtype: str) -> bool:
    """Whether a parameter of this dtype can be trained."""
    return is_floating_point(dtype) or dtype.startswith("complex")


def compute_dtype(own: str, *, precision: str, keep_fp32: bool) -> str:
    """What a parameter of dtype `own` computes in; integers, booleans and complex numbers stay as they are."""
    if precision == "native" or not is_floating_point(own):
        return own
    return "float32" if keep_fp32 else PRECISIONS[precision]


def master_dtype(own: str, *, precision: str) -> str:
    """What the optimizer steps."""
    return own if precision == "native" or not is_floating_point(own) else "float32"


def reduce_dtype(master: str, *, planned: str) -> str:
    """What gradients are summed in: the plan's choice, but never narrower than float64 or complex parameters."""
    return master if BYTES_PER_ELEMENT[master] > 4 else PRECISIONS[planned]
