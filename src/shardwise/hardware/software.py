"""Software by what it is: which kernels run, and how fast each is relative to those of the calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.files.form import record_of, refusing, string, table
from shardwise.hardware.sourced import SOURCED_NUMBER, Sourced, shipped_table

MATMUL_PRECISIONS = ("highest", "high", "medium")
"""Arguments of torch.set_float32_matmul_precision: all but `highest` multiply fp32 values as TF32."""

_PRESETS = "presets"
_KERNELS = {"rms_norm": "norms", "rms_norm_backward": "norms", "attention": "attention", "matmul": "matmul"}
"""Kernel → the fact that decides its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The facts that the speed of kernels depends on (software.toml)."""

    attention: str = "cudnn"
    matmul: str = "cuda-13"
    norms: str = "fused"

    def __post_init__(self) -> None:
        for field in fields(self):
            known = reaches()[field.name]
            if getattr(self, field.name) not in known:
                raise UnknownName.of(f"{field.name} kernel", str(getattr(self, field.name)), known=known)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))

    def reach(self, kernel: str, *, dtype: str, architecture: str) -> float:
        """Return the speed of a kernel relative to the calibration; 1 where the table has no value."""
        fact = _KERNELS.get(kernel)
        if fact is None:
            return 1.0
        given = reaches()[fact][getattr(self, fact)]
        prefix = "backward_" if kernel == "rms_norm_backward" else "fp32_" if dtype == "fp32" else ""
        names = dict.fromkeys((f"{prefix}{architecture}", f"{prefix}any", architecture, "any"))
        return next((given[name].value for name in names if name in given), 1.0)


@cache
def reaches() -> Mapping[str, Mapping[str, Mapping[str, Sourced[float]]]]:
    """Return fact → kernel → architecture → relative speed."""
    return {
        fact: {name: _read(f"{fact}.{name}", given) for name, given in kernels.items()}
        for fact, kernels in shipped_table("software").items()
        if fact != _PRESETS
    }


def _read(name: str, given: object) -> Mapping[str, Sourced[float]]:
    assert isinstance(given, dict)
    with refusing(InvalidCluster):
        string(given["title"], name)
        found: Mapping[str, Sourced[float]] = table(SOURCED_NUMBER)(
            {key: value for key, value in given.items() if key != "title"}, name
        )
    return found


def presets() -> Mapping[str, Mapping[str, str]]:
    return shipped_table("software")[_PRESETS]


def software_of(value: object) -> Software:
    """Return the facts of a preset (2023, 2024 or current) or of a table of facts."""
    if isinstance(value, Software):
        return value
    if isinstance(value, dict):
        forms = dict.fromkeys((field.name for field in fields(Software)), string)
        with refusing(InvalidCluster):
            return Software(**record_of(forms, needs={})(value, "software"))
    if not isinstance(value, str) or value not in presets():
        raise UnknownName.of("software", str(value), known=presets())
    return Software(**presets()[value])


CURRENT = Software()
"""Of the calibration that comes with the package."""


def chosen_software(
    base: Software, *, preset: str | None, attention: str | None, matmul: str | None, norms: str | None
) -> Software:
    """Return the facts of a preset (default: `base`), with those that are given."""
    given = {"attention": attention, "matmul": matmul, "norms": norms}
    found = software_of(preset) if preset is not None else base
    return replace(found, **{name: value for name, value in given.items() if value is not None})


def check_matmul_precision(value: object) -> None:
    if value not in MATMUL_PRECISIONS:
        raise InvalidCluster(f"matmul_precision = {value!r}: must be one of {', '.join(MATMUL_PRECISIONS)}")
