"""Larger clusters of the same devices, as they are rented. No torch."""

from collections.abc import Iterator

from shardwise.hardware import Cluster
from shardwise.hardware.cluster import make_cluster
from shardwise.planner.search.request import MOST_TIMES

PER_NODE = 8
"""Devices of a rented machine; fewer are rented as 1, 2 or 4 of them."""


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters of the same devices, as they are rented: 2, 4 or 8 of them, then 2, 4, 8 … machines of 8.

    Where the links between machines are not known, all devices are in one machine: their memory is the same.
    """
    num_ranks, per_node = cluster.num_ranks, max(PER_NODE, cluster.devices_per_node)
    is_linked = cluster.fabric is not None or cluster.device.nic is not None
    for size in (2**power for power in range(1, 24)):
        if not num_ranks < size <= MOST_TIMES * num_ranks:
            continue
        nodes = size // per_node if is_linked and size > per_node and size % per_node == 0 else 1
        yield make_cluster(
            cluster.device,
            num_nodes=nodes,
            devices_per_node=size // nodes,
            fabric=cluster.fabric if nodes > 1 else None,
            link=cluster.link,
            host_bytes=cluster.host_bytes,
        )
