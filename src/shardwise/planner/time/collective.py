"""How long a collective takes: rings and trees over the links of a cluster, by latency and bandwidth (α–β).

The model is NCCL's own (src/graph/tuning.cc): for each algorithm and protocol a latency that counts hops and a
bandwidth that is that of the slowest link on the way; the fastest of them is taken.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from shardwise.hardware import Cluster, Link
from shardwise.plan.mesh import Mesh

USUAL_SHARE = 0.8
"""What a ring reaches of a link's speed where the table does not say: NCCL counts on 20 of the 25 GB/s of an NVLink
(src/graph/topo.h, SM80_NVLINK_BW)."""

USUAL_LATENCY_SECONDS = 14e-6
"""Of a hop where the table does not say: NCCL's for a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How NCCL moves bytes: with a latency before the first hop, one a hop (a share of the link's), and a share of the
    bandwidth.
    """

    base_seconds: float
    hop: float
    bandwidth: float


# NCCL 2.28, src/graph/tuning.cc, ring: Simple hands over whole chunks; LL128 sends 120 of every 128 bytes as data and
# needs no fence, so that a hop takes 1.9 µs over NVLink where Simple takes 3.4.
PROTOCOLS = (
    Protocol(base_seconds=8.4e-6, hop=1.0, bandwidth=1.0),
    Protocol(base_seconds=14e-6, hop=1.9 / 3.4, bandwidth=0.92),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ranks that communicate together, and what they go over.

    num_ranks, num_nodes    the ranks of the group, and the nodes that they are on, equally many on each
    bytes_per_s             of the slowest link on the way, as one rank of the group sees it
    hop_seconds             from rank to rank within a node; `node_hop_seconds` from node to node
    """

    num_ranks: int
    num_nodes: int = 1
    bytes_per_s: float = float("inf")
    hop_seconds: float = 0.0
    node_hop_seconds: float = 0.0

    def gather_seconds(self, num_bytes: float) -> float:
        """A ring all-gather or reduce-scatter of `num_bytes` in all.

        n−1 rounds, in each of which every rank passes on num_bytes/n:
        t = base + (n−N)·hop + (N−1)·node_hop + num_bytes·(n−1)/n / bandwidth.
        """
        return _ring_seconds(self, num_bytes, 1)

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """A reduce-scatter and an all-gather around the ring, or over several nodes up and down a tree of them."""
        ring = _ring_seconds(self, num_bytes, 2)
        return min(ring, _tree_seconds(self, num_bytes)) if self.num_nodes > 1 else ring

    def all_to_all_seconds(self, num_bytes: float) -> float:
        """Of `num_bytes` in all, each rank holds 1/n and sends (n−1)/n of that."""
        return _ring_seconds(self, num_bytes / self.num_ranks, 1)

    def broadcast_seconds(self, num_bytes: float) -> float:
        """In chunks along the ring, so that the last rank has it one trip after the first."""
        return _ring_seconds(self, num_bytes, 1)


@lru_cache(maxsize=4096)
def _ring_seconds(ring: Ring, num_bytes: float, rounds: int) -> float:
    if ring.num_ranks == 1:
        return 0.0
    between = ring.num_nodes - 1
    hops = rounds * ((ring.num_ranks - 1 - between) * ring.hop_seconds + between * ring.node_hop_seconds)
    sent = rounds * num_bytes * (ring.num_ranks - 1) / ring.num_ranks
    return min(
        protocol.base_seconds + protocol.hop * hops + sent / (protocol.bandwidth * ring.bytes_per_s)
        for protocol in PROTOCOLS
    )


@lru_cache(maxsize=4096)
def _tree_seconds(ring: Ring, num_bytes: float) -> float:
    """Two trees, each of which carries half of the bytes up and down; within a node a chain."""
    on_node = ring.num_ranks // ring.num_nodes
    hops = 2 * ((on_node - 1) * ring.hop_seconds + ceil(log2(ring.num_nodes)) * ring.node_hop_seconds)
    return min(
        protocol.base_seconds
        + protocol.hop * hops
        + 2 * num_bytes / (TREE_BANDWIDTH * protocol.bandwidth * ring.bytes_per_s)
        for protocol in PROTOCOLS
    )


# As above: "busBw*.9" for trees.
TREE_BANDWIDTH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """The groups of a mesh on a cluster: see comm/groups.py."""

    shard: Ring
    replicate: Ring
    world: Ring


def rings_of(mesh: Mesh, *, cluster: Cluster) -> Rings:
    """Ranks are numbered node by node, and those of a shard group are consecutive (mesh.py).

    Of a group that has fewer ranks on a node than the node has devices there are several, which share its fabric.
    """
    per_node = cluster.devices_per_node
    shard_on_node = min(mesh.shard, per_node)
    replicate_on_node = max(1, min(mesh.replicate, per_node // mesh.shard))
    return Rings(
        shard=_ring(mesh.shard, on_node=shard_on_node, cluster=cluster),
        replicate=_ring(mesh.replicate, on_node=replicate_on_node, cluster=cluster),
        world=_ring(mesh.num_ranks, on_node=per_node, cluster=cluster),
    )


def can_link(cluster: Cluster) -> bool:
    """Whether it is known what the ranks communicate over."""
    return cluster.num_ranks == 1 or cluster.devices_per_node == 1 or cluster.link is not None


def _ring(num_ranks: int, *, on_node: int, cluster: Cluster) -> Ring:
    num_nodes = ceil(num_ranks / on_node)
    speeds, hop, node_hop = [], 0.0, 0.0
    if on_node > 1:
        assert cluster.link is not None
        speeds.append(_reached(cluster.link))
        hop = _latency(cluster.link)
    if num_nodes > 1:
        assert cluster.fabric is not None
        groups_on_node = cluster.devices_per_node / on_node
        speeds.append(cluster.fabric.num_links * _reached(cluster.fabric.link) / groups_on_node)
        node_hop = _latency(cluster.fabric.link)
    return Ring(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        bytes_per_s=min(speeds, default=float("inf")),
        hop_seconds=hop,
        node_hop_seconds=node_hop,
    )


def link_speed(link: Link) -> tuple[float, float]:
    """(Bytes per second that a ring reaches over a link, seconds of a hop)."""
    return _reached(link), _latency(link)


def _reached(link: Link) -> float:
    """What a ring reaches, in bytes per second."""
    if link.ring_bytes_per_s is not None:
        return link.ring_bytes_per_s.value
    return USUAL_SHARE * link.bytes_per_s.value


def _latency(link: Link) -> float:
    return link.latency_seconds.value if link.latency_seconds is not None else USUAL_LATENCY_SECONDS
