"""Parses the options of `shardwise plan`: counts, meshes, recompute, clusters."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.plan.mesh import Mesh

if TYPE_CHECKING:
    from shardwise.hardware import Cluster

GOALS = ("throughput", "memory")
OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def check_names(*, optimizer: str, goal: str = "throughput") -> None:
    for kind, name, known in (("goal", goal, GOALS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in known:
            raise UnknownName.of(kind, name, known=known)


def parse_count(text: str | None, *, option: str) -> float | None:
    """Parse `1T`, `300B` or `1e12`; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise InvalidPlan(f"{option} {text}: must be a number, such as 1T, 300B or 1e12")
    return float(found[1]) * _COUNTS[found[2]]


def parse_mesh(text: str | None) -> Mesh | None:
    """Parse `8x4`, replicate × shard; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})[x×]([1-9][0-9]{0,6})", text.strip())
    if found is None:
        raise InvalidPlan(f"--mesh {text}: must be REPLICATExSHARD, such as 8x8")
    return Mesh(replicate=int(found[1]), shard=int(found[2]))


def hybrid_mesh(strategy: str, *, cluster: "Cluster") -> Mesh | None:
    """Return nodes × devices per node, the default mesh of `hybrid_shard`; None for any other strategy."""
    if strategy.strip().lower().replace("-", "_") != "hybrid_shard":
        return None
    if cluster.num_nodes == 1:
        raise InvalidPlan(f"--strategy {strategy}: {cluster} is one node; give --mesh, such as 2x4")
    return Mesh(replicate=cluster.num_nodes, shard=cluster.devices_per_node)


def parse_recompute(text: str) -> tuple[str, dict[str, str]]:
    """Parse `full`, or `full,blocks.[0-8]=none`, into (the default, pattern → what the matching units do)."""
    default, overrides = "none", {}
    for part in (part.strip() for part in text.split(",")):
        pattern, equals, way = part.rpartition("=")
        if equals:
            overrides[pattern] = way
        else:
            default = part
    return default, overrides


def planned_cluster(
    text: str, *, devices: Path | None, software: str | None, matmul_precision: str | None, here: bool
) -> "Cluster":
    from shardwise.hardware import cluster_of
    from shardwise.hardware.cluster_file import read_cluster_file
    from shardwise.hardware.host_here import probed_cluster

    cluster = cluster_of(text)
    if devices is not None:
        measured = read_cluster_file(devices)
        cluster = replace(cluster, device=measured.device, link=measured.link or cluster.link)
    device = replace(
        cluster.device,
        software=software or cluster.device.software,
        matmul_precision=matmul_precision or cluster.device.matmul_precision,
    )
    cluster = replace(cluster, device=device)
    return probed_cluster(cluster) if here else cluster
