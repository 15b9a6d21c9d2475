"""More of the same devices, as they are rented."""

from shardwise.hardware import cluster_of
from shardwise.planner.search.larger_clusters import larger_clusters


def test_more_devices_come_as_they_are_rented() -> None:
    sizes = [str(cluster) for cluster in larger_clusters(cluster_of("1xh100-80gb"))]
    assert sizes[:5] == [
        "2xh100-80gb",
        "4xh100-80gb",
        "8xh100-80gb",
        "2x8xh100-80gb@ib-8x400",
        "4x8xh100-80gb@ib-8x400",
    ]
    assert str(next(larger_clusters(cluster_of("8xrtx-4090")))) == "16xrtx-4090"
