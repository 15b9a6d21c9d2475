"""Links between devices, and fabrics: the links that leave a node."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.hardware.sourced import Sourced, check_table, read_sourced, shipped_table

_KEYS = ("title", "between_nodes", "bytes_per_s", "ring_bytes_per_s", "latency_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One device's link, or one network port.

    bytes_per_s       in one direction
    ring_bytes_per_s  what a ring of collectives reaches of that; None where nobody has sourced it, as below
    latency_seconds   of one message
    between_nodes     a network port, of which fabrics are made
    """

    name: str
    title: str = ""
    bytes_per_s: Sourced[float]
    ring_bytes_per_s: Sourced[float] | None = None
    latency_seconds: Sourced[float] | None = None
    between_nodes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links between nodes: each node has `num_links` of a kind."""

    link: Link
    num_links: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Of one node, in one direction, over all of its links."""
        return self.num_links * self.link.bytes_per_s.value

    def __str__(self) -> str:
        if self.num_links == 1:
            return self.link.name
        kind, _, speed = self.link.name.rpartition("-")
        return f"{kind}-{self.num_links}x{speed}"


def read_link(name: str, table: object, *, key: str) -> Link:
    """The link of a TOML table, which `key` names in errors."""
    fields = check_table(key, table, allowed=_KEYS)
    if "bytes_per_s" not in fields:
        raise InvalidCluster(f"{key}.bytes_per_s is missing: the bytes per second in one direction")
    for field, of in (("title", str), ("between_nodes", bool)):
        if field in fields and not isinstance(fields[field], of):
            raise InvalidCluster(f"{key}.{field} = {fields[field]!r}: must be a {of.__name__}")
    optional = {
        field: read_sourced(f"{key}.{field}", fields[field], of=float)
        for field in ("ring_bytes_per_s", "latency_seconds")
        if field in fields
    }
    return Link(
        name=name,
        title=fields.get("title", ""),
        bytes_per_s=read_sourced(f"{key}.bytes_per_s", fields["bytes_per_s"], of=float),
        between_nodes=fields.get("between_nodes", False),
        **optional,
    )


@cache
def links() -> Mapping[str, Link]:
    """All links that come with the package, by name."""
    table: Mapping[str, Any] = shipped_table("links")
    return {name: read_link(name, fields, key=name) for name, fields in table.items()}


def link_of(name: str) -> Link:
    """The link of a name, such as `nvlink-4`, `pcie-5` or `ib-400`."""
    try:
        return links()[name]
    except KeyError:
        raise UnknownName.of("link", name, known=links(), see="`shardwise devices` lists them all") from None


def port_of(name: str) -> Link:
    """The same, of links between nodes only."""
    ports = {name: link for name, link in links().items() if link.between_nodes}
    try:
        return ports[name]
    except KeyError:
        raise UnknownName.of("fabric", name, known=ports, see="`shardwise devices` lists them all") from None
