"""A cluster as a TOML file, which can describe what no catalogue has.

num_nodes = 2                  # 1 where it is left out
devices_per_node = 4
device = "h100-80gb"           # or a table, see below
fabric = "ib-4x200"            # or a table; the device's usual one where it is left out
software = "2023"              # the generation of kernels (software.toml); `current` where it is left out
matmul_precision = "high"      # what torch.set_float32_matmul_precision is called with; `highest` where it is left out

[device]                       # every number with its source and kind, as in devices.toml
name = "our-h100"
like = "h100-80gb"             # whatever is not given here is taken from there
capacity_bytes = { value = 85_000_000_000, source = "nvidia-smi on node 3", kind = "measured" }

[fabric]                       # all links of a node together; [link], between the devices of a node, likewise
bytes_per_s = { value = 90e9, source = "ib_write_bw", kind = "measured" }
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import InvalidCluster, ShardwiseError
from shardwise.files.toml_file import read_toml
from shardwise.hardware.cluster import Cluster, check_count, fabric_of, make_cluster, parse_cluster
from shardwise.hardware.device import Device, device_of, read_device
from shardwise.hardware.link import Fabric, Link, link_of, read_link
from shardwise.hardware.sourced import check_table

_RUNS_WITH = ("software", "matmul_precision")


def cluster_of(text: str) -> Cluster:
    """The cluster that `text` describes, by its name (cluster.py) or as the path of a file."""
    return read_cluster_file(text) if text.endswith(".toml") else parse_cluster(text)


def read_cluster_file(path: str | Path) -> Cluster:
    """The cluster of a file; a mistake is one line that names the file and the key."""
    try:
        return _cluster(read_toml(path))
    except ShardwiseError as error:
        raise InvalidCluster(f"{path}: {error}") from error


def _cluster(data: dict[str, Any]) -> Cluster:
    check_table("cluster", data, allowed=("num_nodes", "devices_per_node", "device", "link", "fabric", *_RUNS_WITH))
    for key in ("devices_per_node", "device"):
        if key not in data:
            raise InvalidCluster(f"{key} is missing")
    device = replace(_device(data["device"]), **{key: data[key] for key in _RUNS_WITH if key in data})
    num_nodes, devices_per_node = data.get("num_nodes", 1), data["devices_per_node"]
    # Before a fabric is made of them.
    check_count("num_nodes", num_nodes)
    check_count("devices_per_node", devices_per_node)
    return make_cluster(
        device,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        link=_link(data["link"]) if "link" in data else None,
        fabric=_fabric(data["fabric"]) if "fabric" in data else None,
    )


def _device(value: object) -> Device:
    if isinstance(value, str):
        return device_of(value)
    if not isinstance(value, dict):
        raise InvalidCluster(f"device = {value!r}: must be a name or a table")
    table = dict(value)
    name, like = table.pop("name", None), table.pop("like", None)
    for key, text in (("name", name), ("like", like)):
        if text is not None and not isinstance(text, str):
            raise InvalidCluster(f"device.{key} = {text!r}: must be a name")
    base = device_of(like) if like is not None else None
    return read_device(name or like or "custom", table, key="device", like=base)


def _link(value: object) -> Link:
    return link_of(value) if isinstance(value, str) else read_link("custom", value, key="link")


def _fabric(value: object) -> Fabric:
    if isinstance(value, str):
        return fabric_of(value)
    return Fabric(link=read_link("custom", value, key="fabric"))
