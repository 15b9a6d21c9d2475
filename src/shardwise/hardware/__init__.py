"""Hardware: devices, links and clusters, as tables in which every number has a source. No torch here."""

from shardwise.hardware.cluster import Cluster, fabric_of
from shardwise.hardware.cluster_file import cluster_of
from shardwise.hardware.device import Device, device_of, devices
from shardwise.hardware.link import Fabric, Link, link_of, links
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
