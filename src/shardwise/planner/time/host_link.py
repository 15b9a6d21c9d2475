"""The speed of copies between a device and host memory, and of updates there."""

from shardwise.hardware import Device, link_of

# What copies of pinned memory reach of the link's speed, in one direction, and in each of two: 55 and 50 GB/s over
# PCIe 5, measured once on an H200 with copies of 4 GiB.
_ONE_WAY, _BOTH_WAYS = 0.88, 0.80

CPU_UPDATES_PER_S = 2.2e9
"""Elements that the CPUs of a node update in a second by AdamW, with the cast to the compute dtype."""

STREAMED_TENSOR_SECONDS = 150e-6
"""The CPU's time to issue the update of a tensor that passes through the device."""


def host_bytes_per_s(device: Device, *, both_ways: bool = False) -> float:
    """Return the speed of copies to or from host memory; in both directions at once, that of each."""
    assert device.host_link is not None
    return link_of(device.host_link.value).bytes_per_s.value * (_BOTH_WAYS if both_ways else _ONE_WAY)
