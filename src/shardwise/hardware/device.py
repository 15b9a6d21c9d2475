"""Devices, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.files.form import each, refusing, string
from shardwise.files.keys import forms_of, key, values_of
from shardwise.hardware.calibration import CALIBRATION, Calibration
from shardwise.hardware.host_speed import HostSpeed
from shardwise.hardware.software import CURRENT, Software, check_matmul_precision
from shardwise.hardware.sourced import SOURCED_COUNT, SOURCED_NAME, SOURCED_NUMBER, Sourced, shipped_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device; None where no source is known.

    software           the kernels that run on it
    matmul_precision   the argument of torch.set_float32_matmul_precision
    host               the speed of the CPU that issues its work; None: as fast as where the device was calibrated
    """

    name: str
    software: Software = CURRENT
    matmul_precision: str = "highest"
    host: HostSpeed | None = None
    title: str = key("", "its name in full", form=string)
    architecture: str = key("", "the key by which software.toml says how fast its kernels are", form=string)
    aliases: tuple[str, ...] = key((), "other names", form=each(string, words="a list of names"))
    capacity_bytes: Sourced[int] | None = key(None, "the total memory that torch reports", form=SOURCED_COUNT)
    num_processors: Sourced[int] | None = key(
        None, "streaming multiprocessors, over which the tiles of a matrix product are spread", form=SOURCED_COUNT
    )
    processor_hz: Sourced[float] | None = key(None, "their clock", form=SOURCED_NUMBER)
    memory_bytes_per_s: Sourced[float] | None = key(None, "the peak of its memory", form=SOURCED_NUMBER)
    fp32_flops_per_s: Sourced[float] | None = key(None, "the peak of dense matrix products", form=SOURCED_NUMBER)
    tf32_flops_per_s: Sourced[float] | None = key(None, "the same in TF32", form=SOURCED_NUMBER)
    bf16_flops_per_s: Sourced[float] | None = key(None, "the same in bf16", form=SOURCED_NUMBER)
    fp16_flops_per_s: Sourced[float] | None = key(None, "the same in fp16", form=SOURCED_NUMBER)
    fp8_flops_per_s: Sourced[float] | None = key(
        None, "the same in fp8, summed in fp32; none on devices without it", form=SOURCED_NUMBER
    )
    matmul_reach: Sourced[float] | None = key(
        None, "the speed that matrix products reach, relative to the software's (borrowed.py)", form=SOURCED_NUMBER
    )
    attention_reach: Sourced[float] | None = key(None, "the same of attention", form=SOURCED_NUMBER)
    context_bytes: Sourced[int] | None = key(
        None, "memory that a process holds before its first tensor", form=SOURCED_COUNT
    )
    communicator_bytes: Sourced[int] | None = key(None, "memory that each NCCL communicator holds", form=SOURCED_COUNT)
    host_link: Sourced[str] | None = key(None, "name of the link to the CPU", form=SOURCED_NAME)
    link: Sourced[str] | None = key(None, "name of the link to other devices of the node", form=SOURCED_NAME)
    nic: Sourced[str] | None = key(
        None, "name of the link to other nodes that usually comes with each device", form=SOURCED_NAME
    )
    calibration: Calibration | None = key(None, "measurements of `shardwise calibrate`", form=CALIBRATION)

    def __post_init__(self) -> None:
        check_matmul_precision(self.matmul_precision)

    def __hash__(self) -> int:
        # Not over all fields: devices are cache keys, and nearly always the same object.
        return hash(self.name)

    @property
    def torch_type(self) -> str:
        """The type of torch.device: "cpu" or "cuda"."""
        return "cpu" if self.name == "cpu" else "cuda"

    def flops_per_s(self, dtype: str) -> Sourced[float] | None:
        peak: Sourced[float] | None
        try:
            peak = getattr(self, f"{dtype}_flops_per_s")
        except AttributeError:
            known = [n.removesuffix("_flops_per_s") for n in forms_of(Device) if n.endswith("_flops_per_s")]
            raise UnknownName.of("dtype", dtype, known=known) from None
        return peak

    def known(self) -> Iterator[tuple[str, Sourced[Any]]]:
        """Yield each value with a source, by its name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sourced):
                yield field.name, value


def read_device(name: str, table: object, *, key: str, like: Device | None = None) -> Device:
    """Return the device of a TOML table, which `key` names in errors; missing values are taken from `like`."""
    with refusing(InvalidCluster):
        given = {"title": "", "aliases": ()} | values_of(Device)(table, key)
    return replace(like or Device(name=name), name=name, **given)


@cache
def devices() -> Mapping[str, Device]:
    return {name: read_device(name, table, key=name) for name, table in shipped_table("devices").items()}


def device_of(name: str) -> Device:
    """Return a device by name or alias, such as `h100-80gb` or `h100`, in upper or lower case."""
    wanted = name.lower()
    for device in devices().values():
        if wanted == device.name or wanted in device.aliases:
            return device
    known = [spelling for device in devices().values() for spelling in (device.name, *device.aliases)]
    raise UnknownName.of("device", name, known=known, see="`shardwise devices` lists them all")
