"""The speed of copies between a device and host memory, and of updates there."""

from shardwise.hardware import Cluster, Device, device_of, link_of
from shardwise.hardware.borrowed import USUAL
from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.host_memory_speed import HostMemorySpeed

NODE_BYTES_PER_S = 614.4e9
"""The host memory of a usual node with 8 GPUs: two CPUs with 8 channels of DDR5-4800 each, 38.4 GB/s per channel."""

PINNED_BYTES_PER_S = 7.2e9
"""How fast memory is pinned when a job starts: 0.15 s for each GiB, measured once on an H200's host."""


def host_memory_speed(device: Device) -> HostMemorySpeed:
    """Return the speed as probed on this host, as calibrated, or as the lender's over the device's own link."""
    if device.host is not None and device.host.memory is not None:
        return device.host.memory
    own = device.calibration or shipped_calibration(device.name)
    if own is not None and own.host_memory is not None:
        return own.host_memory
    lent = shipped_calibration(USUAL)
    assert lent is not None
    assert lent.host_memory is not None
    return lent.host_memory.over(_link_bytes_per_s(device) / _link_bytes_per_s(device_of(USUAL)))


def _link_bytes_per_s(device: Device) -> float:
    assert device.host_link is not None
    return link_of(device.host_link.value).bytes_per_s.value


def host_bytes_per_s(cluster: Cluster, *, both_ways: bool = False) -> float:
    """Return the speed of copies to or from host memory; in both directions at once, that of each.

    The devices of a node share its memory.
    """
    speed = host_memory_speed(cluster.device)
    own = speed.both_bytes_per_s if both_ways else speed.copy_bytes_per_s
    ranks = min(cluster.num_ranks, cluster.devices_per_node)
    return min(own, NODE_BYTES_PER_S / ranks / (2 if both_ways else 1))
