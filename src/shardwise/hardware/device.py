"""Devices, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.hardware.calibration import Calibration, read_calibration
from shardwise.hardware.host_speed import HostSpeed
from shardwise.hardware.software import CURRENT, check_matmul_precision, software_of
from shardwise.hardware.sourced import Sourced, check_table, read_sourced, shipped_table

_VALUES: Mapping[str, type] = {
    "capacity_bytes": int,
    "num_processors": int,
    "processor_hz": float,
    "memory_bytes_per_s": float,
    "fp32_flops_per_s": float,
    "tf32_flops_per_s": float,
    "bf16_flops_per_s": float,
    "fp16_flops_per_s": float,
    "matmul_reach": float,
    "attention_reach": float,
    "context_bytes": int,
    "communicator_bytes": int,
    "host_link": str,
    "link": str,
    "nic": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What is known of a kind of device; None where nobody has sourced it.

    capacity_bytes       what torch reports as its total memory
    num_processors       streaming multiprocessors, over which the tiles of a matrix product are spread
    processor_hz         their clock
    *_flops_per_s        peak of dense matrix products
    *_reach              what matrix products and attention reach, relative to what its software does (borrowed.py)
    context_bytes        what a process holds before it has made one tensor
    communicator_bytes   what each NCCL communicator holds
    host_link            name of the link to the CPU
    link                 name of the link to the other devices of its node
    nic                  name of the link to other nodes that usually comes with each device
    calibration          what `shardwise calibrate` measured of it
    architecture         by which software.toml finds how fast kernels are on it
    software             the generation of software that runs on it
    matmul_precision     what torch.set_float32_matmul_precision was called with
    host                 how fast the CPU is that issues its work; None: assumed to be as where it was calibrated
    """

    name: str
    title: str = ""
    architecture: str = ""
    software: str = CURRENT
    matmul_precision: str = "highest"
    aliases: tuple[str, ...] = ()
    capacity_bytes: Sourced[int] | None = None
    num_processors: Sourced[int] | None = None
    processor_hz: Sourced[float] | None = None
    memory_bytes_per_s: Sourced[float] | None = None
    fp32_flops_per_s: Sourced[float] | None = None
    tf32_flops_per_s: Sourced[float] | None = None
    bf16_flops_per_s: Sourced[float] | None = None
    fp16_flops_per_s: Sourced[float] | None = None
    matmul_reach: Sourced[float] | None = None
    attention_reach: Sourced[float] | None = None
    context_bytes: Sourced[int] | None = None
    communicator_bytes: Sourced[int] | None = None
    host_link: Sourced[str] | None = None
    link: Sourced[str] | None = None
    nic: Sourced[str] | None = None
    calibration: Calibration | None = None
    host: HostSpeed | None = None

    def __post_init__(self) -> None:
        software_of(self.software)
        check_matmul_precision(self.matmul_precision)

    def __hash__(self) -> int:
        # Not over all it holds: devices are keys of caches, and nearly always the very same object.
        return hash(self.name)

    def flops_per_s(self, dtype: str) -> Sourced[float] | None:
        """The peak in fp32, tf32, bf16 or fp16."""
        peak: Sourced[float] | None
        try:
            peak = getattr(self, f"{dtype}_flops_per_s")
        except AttributeError:
            known = [name.removesuffix("_flops_per_s") for name in _VALUES if name.endswith("_flops_per_s")]
            raise UnknownName.of("dtype", dtype, known=known) from None
        return peak

    def known(self) -> Iterator[tuple[str, Sourced[Any]]]:
        """Each value that is known, by its name."""
        for name in _VALUES:
            value = getattr(self, name)
            if value is not None:
                yield name, value


def read_device(name: str, table: object, *, key: str, like: Device | None = None) -> Device:
    """The device of a TOML table, which `key` names in errors; what it leaves out is taken from `like`."""
    given = check_table(key, table, allowed=("title", "architecture", "aliases", "calibration", *_VALUES))
    values: dict[str, Any] = {}
    if like is not None:
        values = {field.name: getattr(like, field.name) for field in fields(like)}
        values["aliases"] = ()
    for name_of in ("title", "architecture"):
        if not isinstance(given.get(name_of, ""), str):
            raise InvalidCluster(f"{key}.{name_of} = {given[name_of]!r}: must be text")
    aliases = given.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidCluster(f"{key}.aliases = {aliases!r}: must be a list of names")
    for field, value in given.items():
        if field in _VALUES:
            values[field] = read_sourced(f"{key}.{field}", value, of=_VALUES[field])
    if "calibration" in given:
        values["calibration"] = read_calibration(given["calibration"], key=f"{key}.calibration")
    if "architecture" in given:
        values["architecture"] = given["architecture"]
    values.update(name=name, title=given.get("title", ""), aliases=tuple(aliases))
    return Device(**values)


@cache
def devices() -> Mapping[str, Device]:
    """All devices that come with the package, by name."""
    return {name: read_device(name, table, key=name) for name, table in shipped_table("devices").items()}


def device_of(name: str) -> Device:
    """The device of a name or alias, such as `h100-80gb` or `h100`; upper and lower case are one."""
    wanted = name.lower()
    for device in devices().values():
        if wanted == device.name or wanted in device.aliases:
            return device
    known = [spelling for device in devices().values() for spelling in (device.name, *device.aliases)]
    raise UnknownName.of("device", name, known=known, see="`shardwise devices` lists them all")
