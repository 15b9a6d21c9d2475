"""A cluster as a TOML file, which can also describe your own devices and links.

num_nodes = 2                  # default: 1
devices_per_node = 4
device = "h100-80gb"           # or a table, see below
fabric = "ib-4x200"            # or a table; default: the device's usual one
host_bytes = 256_000_000_000   # of each machine's memory, that a plan may use; default: unknown
software = "2023"              # a preset, or { attention = "flash-2", … } (software.toml); default: current
matmul_precision = "high"      # the argument of torch.set_float32_matmul_precision; default: highest

[device]                       # every number with its source and kind, as in devices.toml
name = "our-h100"
like = "h100-80gb"             # the source of all values that are not given here
capacity_bytes = { value = 85_000_000_000, source = "nvidia-smi on node 3", kind = "measured" }

[fabric]                       # all links of a node together; [link], between the devices of a node, likewise
bytes_per_s = { value = 90e9, source = "ib_write_bw", kind = "measured" }
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import InvalidCluster, ShardwiseError
from shardwise.files.data_file import read_toml
from shardwise.files.form import Form, anything, check_names, inside, record_of, refusing
from shardwise.files.keys import forms_of
from shardwise.hardware.cluster import Cluster, fabric_of, make_cluster, parse_cluster
from shardwise.hardware.device import Device, device_of, read_device
from shardwise.hardware.link import Fabric, link_of, read_link
from shardwise.hardware.software import software_of
from shardwise.hardware.sourced import NAME

_RUNS_WITH = ("software", "matmul_precision")


def cluster_of(text: str) -> Cluster:
    """Return the cluster that `text` describes, by its name (cluster.py) or as the path of a file."""
    return read_cluster_file(text) if text.endswith(".toml") else parse_cluster(text)


def read_cluster_file(path: str | Path) -> Cluster:
    """Read a cluster from a file; a mistake is one line that names the file and the key."""
    try:
        return _cluster(read_toml(path))
    except ShardwiseError as error:
        raise InvalidCluster(f"{path}: {error}") from error


def _cluster(data: dict[str, Any]) -> Cluster:
    with refusing(InvalidCluster):
        check_names(data, "cluster", known=_FORMS)
        given = record_of(_FORMS, needs={"devices_per_node": "", "device": ""})(data, "")
    runs_with = {key: given.pop(key) for key in _RUNS_WITH if key in given}
    if "software" in runs_with:
        runs_with["software"] = software_of(runs_with["software"])
    device = replace(given.pop("device"), **runs_with)
    return make_cluster(device, **{"num_nodes": 1, "fabric": None, **given})


def _device(value: Any, path: str) -> Device:
    if isinstance(value, str):
        return device_of(value)
    own = {key: NAME(value[key], inside(path, key)) for key in ("name", "like") if key in value}
    base = device_of(own["like"]) if "like" in own else None
    values = {key: item for key, item in value.items() if key not in own}
    return read_device(own.get("name") or own.get("like") or "custom", values, key=path, like=base)


def _fabric(value: Any, path: str) -> Fabric:
    return fabric_of(value) if isinstance(value, str) else Fabric(link=read_link("custom", value, key=path))


_FORMS = {
    **forms_of(Cluster),
    "device": Form(words="a name or a table", fits=lambda value: isinstance(value, str | dict), read=_device),
    "link": anything.then(
        lambda value, path: link_of(value) if isinstance(value, str) else read_link("custom", value, key=path)
    ),
    "fabric": anything.then(_fabric),
    **dict.fromkeys(_RUNS_WITH, anything),
}
