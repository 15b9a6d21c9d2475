"""Devices, the links between them, and fabrics, which are the links that leave a node; each by name.

`Software` says which kernels run on a device, and how fast each is relative to those of the calibration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from shardwise.base.errors import InvalidCluster, UnknownName
from shardwise.base.files.form import Form, each, record_of, refusing, string, switch, table
from shardwise.base.files.keys import forms_of, key, values_of
from shardwise.hardware.calibration import CALIBRATION, Calibration, HostSpeed
from shardwise.hardware.sourced import SOURCED_COUNT, SOURCED_NAME, SOURCED_NUMBER, Sourced, shipped_table

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One device's link, or one network port; None where no source is known."""

    name: str
    title: str = key("", "its name in full", form=string)
    bytes_per_s: Sourced[float] = key(..., "the bytes per second in one direction", form=SOURCED_NUMBER)
    ring_bytes_per_s: Sourced[float] | None = key(
        None, "the bytes per second that a ring of collectives reaches", form=SOURCED_NUMBER
    )
    latency_seconds: Sourced[float] | None = key(None, "the latency of one message", form=SOURCED_NUMBER)
    between_nodes: bool = key(
        False, "a network port, of which fabrics are made", form=Form(words="a bool", fits=switch.fits)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links between nodes: each node has `num_links` equal ones."""

    link: Link
    num_links: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of one node in one direction, over all of its links."""
        return self.num_links * self.link.bytes_per_s.value

    def __str__(self) -> str:
        if self.num_links == 1:
            return self.link.name
        kind, _, speed = self.link.name.rpartition("-")
        return f"{kind}-{self.num_links}x{speed}"


def read_link(name: str, table: object, *, key: str) -> Link:
    """Return the link of a TOML table, which `key` names in errors."""
    with refusing(InvalidCluster):
        return Link(name=name, **values_of(Link)(table, key))


@cache
def links() -> Mapping[str, Link]:
    """Return all links that come with the package, by name."""
    return {name: read_link(name, fields, key=name) for name, fields in shipped_table("links").items()}


def link_of(name: str) -> Link:
    """Return a link by name, such as `nvlink-4`, `pcie-5` or `ib-400`."""
    return _find("link", name, among=links())


def port_of(name: str) -> Link:
    """Return a link between nodes by name."""
    return _find("fabric", name, among={name: link for name, link in links().items() if link.between_nodes})


def _find(kind: str, name: str, *, among: Mapping[str, Link]) -> Link:
    if name not in among:
        raise UnknownName.of(kind, name, known=among, see="`shardwise devices` lists them all")
    return among[name]
