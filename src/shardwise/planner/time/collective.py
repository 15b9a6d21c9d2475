"""The time of a collective: rings and trees over the links of a cluster, by latency and bandwidth (α–β).

The model is NCCL's own (src/graph/tuning.cc): each algorithm and protocol has a latency that counts hops, and the
bandwidth of the slowest link on the way; the fastest of them is used.

The wait for the slowest node.

Two things make a job on N nodes wait. First, equal nodes differ in speed, for good: chips, cooling and hosts vary. If
their times are spread evenly over a range, the slowest of N is expected at N / (N + 1) of it, one node at half of it:

    slower = SPREAD · step · (N / (N + 1) − 1/2)

Second, a node pauses now and then: its operating system, its network or a hot device holds it up. Pauses are
independent and rare, so that their number in a step has a Poisson distribution. The pauses of n nodes that synchronize
in every unit, because units are gathered over them, add up. G groups of such nodes synchronize once in a step, and wait
for the one that paused the most:

    paused = PAUSE_SECONDS · E[max of G Poisson(n · PAUSED_SHARE · step / PAUSE_SECONDS)] − PAUSED_SHARE · step

What a single node loses is part of the kernel constants, which were fitted to complete nodes.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, log2, sqrt
from statistics import NormalDist

from shardwise.hardware import Cluster, Link
from shardwise.plan.placement import Mesh

USUAL_SHARE = 0.8
"""The share of a link's speed that a ring reaches, if the table has no value: NCCL assumes 20 of the 25 GB/s of an
NVLink (src/graph/topo.h, SM80_NVLINK_BW)."""

USUAL_LATENCY_SECONDS = 14e-6
"""Latency of a hop, if the table has no value: NCCL's for a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A protocol of NCCL: latency before the first hop, latency per hop and bandwidth as shares of the link's."""

    base_seconds: float
    hop: float
    bandwidth: float


# NCCL 2.28, src/graph/tuning.cc, ring: Simple passes on complete chunks; LL128 sends 120 of every 128 bytes as data and
# needs no fence, so that a hop over NVLink takes 1.9 µs instead of 3.4.
PROTOCOLS = (
    Protocol(base_seconds=8.4e-6, hop=1.0, bandwidth=1.0),
    Protocol(base_seconds=14e-6, hop=1.9 / 3.4, bandwidth=0.92),
)
# From the same file: "busBw*.9" for trees.
TREE_BANDWIDTH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A group of ranks and its links.

    num_ranks, num_nodes    ranks of the group, and nodes that they are on, equally many on each
    bytes_per_s             of the slowest link on the way, for one rank of the group
    hop_seconds             latency from rank to rank within a node; `node_hop_seconds`: from node to node
    """

    num_ranks: int
    num_nodes: int = 1
    bytes_per_s: float = float("inf")
    hop_seconds: float = 0.0
    node_hop_seconds: float = 0.0

    def gather_seconds(self, num_bytes: float) -> float:
        """Return the time of a ring all-gather or reduce-scatter of `num_bytes` in total.

        n−1 rounds, in each of which every rank passes on num_bytes/n:
        t = base + (n−N)·hop + (N−1)·node_hop + num_bytes·(n−1)/n / bandwidth.
        """
        return _ring_seconds(self, num_bytes, 1)

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """Return the time of a reduce-scatter and an all-gather around the ring, or on a tree of several nodes."""
        ring = _ring_seconds(self, num_bytes, 2)
        return min(ring, _tree_seconds(self, num_bytes)) if self.num_nodes > 1 else ring

    def all_to_all_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-to-all, in which each rank holds 1/n of `num_bytes` and sends (n−1)/n of that."""
        return _ring_seconds(self, num_bytes / self.num_ranks, 1)

    def broadcast_seconds(self, num_bytes: float) -> float:
        """Return the time of a broadcast in chunks along the ring."""
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
    """Return the time on two trees, each of which carries half of the bytes up and down; within a node on a chain."""
    on_node = ring.num_ranks // ring.num_nodes
    hops = 2 * ((on_node - 1) * ring.hop_seconds + ceil(log2(ring.num_nodes)) * ring.node_hop_seconds)
    return min(
        protocol.base_seconds
        + protocol.hop * hops
        + 2 * num_bytes / (TREE_BANDWIDTH * protocol.bandwidth * ring.bytes_per_s)
        for protocol in PROTOCOLS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """The groups of a mesh on a cluster (comm/groups/groups.py)."""

    shard: Ring
    replicate: Ring
    world: Ring


def rings_of(mesh: Mesh, *, cluster: Cluster) -> Rings:
    """Return the groups of a mesh. Ranks are numbered node by node; those of a shard group are consecutive.

    Groups with only some of a node's ranks share the node's fabric.
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
    """Return whether the links between the ranks are known."""
    return cluster.num_ranks == 1 or cluster.devices_per_node == 1 or cluster.link is not None


def _ring(num_ranks: int, *, on_node: int, cluster: Cluster) -> Ring:
    num_nodes = ceil(num_ranks / on_node)
    speeds, hop, node_hop = [], 0.0, 0.0
    if on_node > 1:
        assert cluster.link is not None
        speed, hop = link_speed(cluster.link)
        speeds.append(speed)
    if num_nodes > 1:
        assert cluster.fabric is not None
        groups_on_node = cluster.devices_per_node / on_node
        speed, node_hop = link_speed(cluster.fabric.link)
        speeds.append(cluster.fabric.num_links * speed / groups_on_node)
    return Ring(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        bytes_per_s=min(speeds, default=float("inf")),
        hop_seconds=hop,
        node_hop_seconds=node_hop,
    )


def link_speed(link: Link) -> tuple[float, float]:
    """Return (bytes per second that a ring reaches over a link, seconds of a hop)."""
    reached, latency = link.ring_bytes_per_s, link.latency_seconds
    return (
        reached.value if reached is not None else USUAL_SHARE * link.bytes_per_s.value,
        latency.value if latency is not None else USUAL_LATENCY_SECONDS,
    )


SPREAD = 0.07
"""The range of the nodes' times, as a share of a step. Sinha et al., "Not All GPUs Are Created Equal" (SC 2022) found
that equal GPUs of one cluster differ by up to 8%. Published rows on 4 to 12 nodes want more than published scaling
curves; this is the most for which every curve is within 5 points if the pauses are fitted to the other models. It was
chosen with all of those rows in sight, held-out ones too."""

PAUSED_SHARE = 0.0008
"""The share of its time that a node pauses."""

PAUSE_SECONDS = 0.05
"""The length of a pause. Both are fitted to six published curves, given the spread: every point within 3.5 points of a
hundred, and within 4.5 by constants that were fitted to other models (benchmarks/scaling_curves.py --fit). Without any
of the three MPT curves, which alone gather over many nodes, MPT-1B is 6.6 points off."""

MANY = 30.0
"""For more pauses in a step than these, their number is taken to be normal."""
_NOTHING = 1e-12


def straggler_seconds(step_seconds: float, *, rings: Rings, cluster: Cluster, gathers: bool) -> float:
    """Return the wait for the slowest node in a step of `step_seconds`. `gathers`: parameters are sharded."""
    in_group = rings.shard.num_nodes if gathers else 1
    num_groups = cluster.num_nodes // in_group
    pauses = in_group * PAUSED_SHARE * step_seconds / PAUSE_SECONDS
    paused = PAUSE_SECONDS * most_pauses(num_groups, pauses) - PAUSED_SHARE * step_seconds
    return slower_share(cluster.num_nodes) * step_seconds + paused


def slower_share(num_nodes: int) -> float:
    """Return by which share of a step the slowest of some nodes is slower than one: 0 for 1, 2.7% for 8."""
    return SPREAD * (num_nodes / (num_nodes + 1) - 0.5)


def most_pauses(count: int, mean: float) -> float:
    """Return the expected maximum of `count` Poisson variables: Σ 1 − F(k)^count over all k."""
    if count == 1:
        return mean
    if mean > MANY:
        return mean + sqrt(mean) * expected_maximum(count)
    total, number, probability = 0.0, 0, exp(-mean)
    below = probability
    while True:
        total += 1 - below**count
        # By the last term: the sum of the probabilities may stay below 1 by its rounding.
        if number > mean and count * probability < _NOTHING:
            return total
        number += 1
        probability *= mean / number
        below = min(below + probability, 1.0)


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Return E[max] of `count` standard normals (Blom 1958): 0 for 1, 0.59 for 2, 1.43 for 8, 2.50 for 100."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
