"""Clusters: the number and kind of devices, and the links between them.

    cluster = [nodes "x"] devices "x" kind ["@" fabric]        16x8xh100-80gb@ib-8x400
    fabric  = network "-" [links "x"] gigabits_per_s           ib-8x400: 8 × 400 Gb/s per node

or the path of a TOML file, which can also describe your own devices and links:

num_nodes = 2                  # default: 1
devices_per_node = 4
device = "h100-80gb"           # or a table, see below
fabric = "ib-4x200"            # or a table; default: the device's usual one
host_bytes = 256_000_000_000   # of each machine's memory, that a plan may use; default: unknown
software = "2023"              # a preset, or { attention = "flash-2", … } (software.toml); default: current
matmul_precision = "high"      # the argument of torch.set_float32_matmul_precision; default: highest

[device]                       # every number with its source and kind, as in devices.toml
name = "our-h100"
like = "h100-80gb"             # the source of all values that are not given here
capacity_bytes = { value = 85_000_000_000, source = "nvidia-smi on node 3", kind = "measured" }

[fabric]                       # all links of a node together; [link], between the devices of a node, likewise
bytes_per_s = { value = 90e9, source = "ib_write_bw", kind = "measured" }
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from shardwise.base.errors import InvalidCluster, ShardwiseError
from shardwise.base.files.data_file import read_toml
from shardwise.base.files.form import Form, anything, check_names, inside, record_of, refusing
from shardwise.base.files.keys import check_keys, forms_of, key
from shardwise.base.vocabulary.printable import printable
from shardwise.hardware.device import (
    Device,
    Fabric,
    Link,
    device_of,
    link_of,
    port_of,
    read_device,
    read_link,
    software_of,
)
from shardwise.hardware.sourced import NAME, Sourced

_EXAMPLE = "8xh100-80gb or 16x8xh100-80gb@ib-8x400"
# A longer count is a typing error, and must not be allocated.
_MOST_DIGITS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` machines with `devices_per_node` equal devices each; one rank per device.

    link     between the devices of a node; None if unknown
    fabric   between nodes; None for one node
    assumes_fabric   whether that is the device's usual one, because none was given
    expands_segments   torch's caching allocator has expandable segments there
    host_bytes   memory of each node's host that a plan may use; None if unknown
    """

    num_nodes: int = key(1, "machines", least=1)
    devices_per_node: int = key(..., "devices of each machine, one per rank", least=1)
    device: Device
    link: Link | None = None
    fabric: Fabric | None = None
    assumes_fabric: bool = False
    expands_segments: bool = False
    host_bytes: int | None = key(None, "bytes of each machine's memory that a plan may use; 0: none", least=0)

    def __post_init__(self) -> None:
        check_keys(self, error=InvalidCluster)
        if self.num_nodes > 1 and self.fabric is None:
            raise InvalidCluster(f"{self.num_nodes} nodes without a fabric: say what links them, such as ib-8x400")
        if self.num_nodes == 1 and self.fabric is not None:
            raise InvalidCluster(f"one node with a fabric ({self.fabric}): there is nothing for it to link")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        fabric = f"@{self.fabric}" if self.fabric is not None else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}{fabric}"


def parse_cluster(text: str) -> Cluster:
    return _Parser(text).cluster()


def make_cluster(
    device: Device,
    *,
    num_nodes: int,
    devices_per_node: int,
    fabric: Fabric | None,
    link: Link | None = None,
    host_bytes: int | None = None,
) -> Cluster:
    """Return a cluster with the device's own link and, for several nodes, its usual fabric, unless they are given."""
    if link is None and device.link is not None:
        link = link_of(device.link.value)
    is_assumed = fabric is None and num_nodes > 1 and device.nic is not None
    if is_assumed and device.nic is not None:
        fabric = Fabric(link=port_of(device.nic.value), num_links=devices_per_node)
    return Cluster(
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        link=link,
        fabric=fabric,
        assumes_fabric=is_assumed,
        host_bytes=host_bytes,
    )


def capacity_bytes(cluster: Cluster) -> int | None:
    return cluster.device.capacity_bytes.value if cluster.device.capacity_bytes is not None else None


def with_budget(cluster: Cluster, *, budget_bytes: int | None) -> Cluster:
    """Return the cluster with its devices limited to the budget."""
    capacity = capacity_bytes(cluster)
    if budget_bytes is None or (capacity is not None and capacity <= budget_bytes):
        return cluster
    budget = Sourced(value=budget_bytes, kind="datasheet", source="the budget that was asked for")
    return replace(cluster, device=replace(cluster.device, capacity_bytes=budget))


def plain_fabric(gigabits_per_s: float) -> Fabric:
    """Return a fabric of which only the Gb/s of a node are known."""
    speed = Sourced(value=gigabits_per_s * 1e9 / 8, source="given", kind="measured")
    return Fabric(link=Link(name=f"{gigabits_per_s:g}-gbps", bytes_per_s=speed, between_nodes=True))


def fabric_of(text: str) -> Fabric:
    """Parse a fabric such as `ib-8x400`, `roce-400` or `eth-100`."""
    return _Parser(text).fabric()


class _Parser:
    """Reads a string from left to right; `position` is the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def cluster(self) -> Cluster:
        counts = [self._count("devices")]
        self._expect("x", after=f"{counts[0]} (devices x kind, such as {_EXAMPLE})")
        if self._peek(r"\d+x"):
            counts.append(self._count("devices"))
            self._expect("x", after=str(counts[1]))
        if self._peek(r"\d+x"):
            self._fail("expected a kind of device: before it stand nodes x devices and no third number")
        num_nodes, devices_per_node = counts if len(counts) == 2 else (1, counts[0])
        device = device_of(self._take(r"[\w.-]+", expected="a kind of device, such as h100-80gb"))
        fabric, at = None, self.position
        if self._peek("@"):
            self.position += 1
            fabric = self.fabric()
            if num_nodes == 1:
                self.position = at
                self._fail("one node has no links to others: say how many nodes (2x8xh100-80gb@…), or leave @ out")
        self._expect_end()
        if num_nodes > 1 and fabric is None and device.nic is None:
            self._fail(f"what links nodes of {device.name} is not known: add it, such as @eth-100 or @ib-8x400")
        return make_cluster(device, num_nodes=num_nodes, devices_per_node=devices_per_node, fabric=fabric)

    def fabric(self) -> Fabric:
        network = self._take(r"[A-Za-z]+", expected="a network, such as ib, roce, eth or efa").lower()
        self._expect("-", after=f"{network} (such as {network}-8x400: 8 links of 400 Gb/s a node)")
        num_links = 1
        if self._peek(r"\d+x"):
            num_links = self._count("links")
            self._expect("x", after=str(num_links))
        speed = self._take(r"\d+", expected="the Gb/s of a link, such as 400")
        self._expect_end()
        return Fabric(link=port_of(f"{network}-{speed}"), num_links=num_links)

    def _count(self, what: str) -> int:
        start = self.position
        digits = self._take(r"[0-9]+", expected=f"a number of {what}, as in {_EXAMPLE}")
        if len(digits) > _MOST_DIGITS or int(digits) == 0:
            self.position = start
            self._fail(f"a number of {what} is from 1 to {10**_MOST_DIGITS - 1:,}")
        return int(digits)

    def _peek(self, pattern: str) -> bool:
        return re.compile(pattern, re.ASCII).match(self.text, self.position) is not None

    def _take(self, pattern: str, *, expected: str) -> str:
        found = re.compile(pattern, re.ASCII).match(self.text, self.position)
        if found is None:
            self._fail(f"expected {expected}")
        self.position = found.end()
        return found.group()

    def _expect(self, sign: str, *, after: str) -> None:
        if not self.text.startswith(sign, self.position):
            self._fail(f"expected {sign!r} after {after}")
        self.position += len(sign)

    def _expect_end(self) -> None:
        if self.position < len(self.text):
            self._fail(f"unexpected {self.text[self.position]!r}; a cluster is written {_EXAMPLE}")

    def _fail(self, message: str) -> NoReturn:
        """Raise an error that shows the string with a mark under the current character."""
        raise InvalidCluster(f"{message}\n  {printable(self.text)}\n  {' ' * self.position}^")


_RUNS_WITH = ("software", "matmul_precision")


def cluster_of(text: str) -> Cluster:
    """Return the cluster that `text` describes, by its name (cluster.py) or as the path of a file."""
    return read_cluster_file(text) if text.endswith(".toml") else parse_cluster(text)


def read_cluster_file(path: str | Path) -> Cluster:
    """Read a cluster from a file; a mistake is one line that names the file and the key."""
    try:
        return _cluster(read_toml(path))
    except ShardwiseError as error:
        raise InvalidCluster(f"{path}: {error}") from error


def _cluster(data: dict[str, Any]) -> Cluster:
    with refusing(InvalidCluster):
        check_names(data, "cluster", known=_FORMS)
        given = record_of(_FORMS, needs={"devices_per_node": "", "device": ""})(data, "")
    runs_with = {key: given.pop(key) for key in _RUNS_WITH if key in given}
    if "software" in runs_with:
        runs_with["software"] = software_of(runs_with["software"])
    device = replace(given.pop("device"), **runs_with)
    return make_cluster(device, **{"num_nodes": 1, "fabric": None, **given})


def _device(value: Any, path: str) -> Device:
    if isinstance(value, str):
        return device_of(value)
    own = {key: NAME(value[key], inside(path, key)) for key in ("name", "like") if key in value}
    base = device_of(own["like"]) if "like" in own else None
    values = {key: item for key, item in value.items() if key not in own}
    return read_device(own.get("name") or own.get("like") or "custom", values, key=path, like=base)


def _fabric(value: Any, path: str) -> Fabric:
    return fabric_of(value) if isinstance(value, str) else Fabric(link=read_link("custom", value, key=path))


_FORMS = {
    **forms_of(Cluster),
    "device": Form(words="a name or a table", fits=lambda value: isinstance(value, str | dict), read=_device),
    "link": anything.then(
        lambda value, path: link_of(value) if isinstance(value, str) else read_link("custom", value, key=path)
    ),
    "fabric": anything.then(_fabric),
    **dict.fromkeys(_RUNS_WITH, anything),
}
