"""Hardware: devices, links and clusters, as tables in which every number has a source. No torch here.

measuring/ makes such tables of this machine; only there is torch imported.
"""

from shardwise.hardware.cluster import Cluster, cluster_of, fabric_of
from shardwise.hardware.device import Device, Fabric, Link, device_of, devices, link_of, links
from shardwise.hardware.sourced import KINDS, Sourced

__all__ = [
    "KINDS",
    "Cluster",
    "Device",
    "Fabric",
    "Link",
    "Sourced",
    "cluster_of",
    "device_of",
    "devices",
    "fabric_of",
    "link_of",
    "links",
]
