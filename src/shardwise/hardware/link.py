"""Links between devices, and fabrics: the links that leave a node."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.files.form import Form, refusing, string, switch
from shardwise.files.keys import key, values_of
from shardwise.hardware.sourced import SOURCED_NUMBER, Sourced, shipped_table


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
