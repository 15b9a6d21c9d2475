"""Expandable segments of torch's caching allocator, as the environment sets them.

Segments that grow fragment less than segments of fixed size, which are requested in many sizes where units are gathered
and freed. torch reads PYTORCH_CUDA_ALLOC_CONF and, only where that is not set, PYTORCH_ALLOC_CONF.
"""

from collections.abc import Mapping

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_KEY = "expandable_segments"
_ON = f"{_KEY}:True"
# An allocator that has no segments.
_OTHER = "backend:cudaMallocAsync"


def expanding_segments(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes segments expand, with the settings that are there; {} if these decide it."""
    name, settings = _read(variables)
    if _OTHER in settings or any(setting.startswith(f"{_KEY}:") for setting in settings):
        return {}
    return {name: ",".join([*settings, _ON])}


def segments_expand(variables: Mapping[str, str]) -> bool:
    """Return whether segments expand in a process with this environment."""
    return _ON in _read(variables)[1]


def fixed_segments(variables: Mapping[str, str]) -> str:
    """Return the settings of this environment with segments of fixed size."""
    others = [setting for setting in _read(variables)[1] if not setting.startswith(f"{_KEY}:")]
    return ",".join([*others, f"{_KEY}:False"])


def _read(variables: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the variable that torch reads, and its settings."""
    name = next((name for name in _NAMES if name in variables), _NAMES[-1])
    return name, [part for part in "".join(variables.get(name, "").split()).split(",") if part]
