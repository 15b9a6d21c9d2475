"""The speed of this machine's host: as it was probed within the last day, or probed now. No torch here.

The probe runs in a process of its own, which holds no memory of a GPU afterwards. What it found is kept in the user's
cache folder for a day: other users of a host come and go, and a new torch or driver changes what a call costs.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.errors import InvalidCluster, InvalidData
from shardwise.files.cache_folder import cached_text, keep_text
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.device import Device
from shardwise.hardware.host_speed import HostSpeed, read_host_speed

_KIND = "hosts"
_VALID_SECONDS = 24 * 3600.0
_LIMIT_SECONDS = 120.0


def host_is_probed(device: Device) -> bool:
    """Whether predictions for it are of a host that was measured, not of one that is assumed."""
    return device.host is not None


def probed_cluster(cluster: Cluster) -> Cluster:
    """The cluster, whose hosts are all as fast as this one."""
    kind = "cpu" if cluster.device.name == "cpu" else "cuda"
    return replace(cluster, device=replace(cluster.device, host=host_here(kind, title=cluster.device.name)))


def host_here(kind: str, *, title: str = "") -> HostSpeed:
    """How fast this host issues work to a device of `kind`, "cuda" or "cpu", with that `title` of its driver."""
    key = _key(kind, title=title)
    found = _kept(cached_text(_KIND, key))
    if found is None:
        found = _probed(kind)
        keep_text(_KIND, key, json.dumps({"when": time.time(), "host": found.to_data()}))
    return found


def _kept(text: str | None) -> HostSpeed | None:
    """What was kept, unless it is too old or broken."""
    if text is None:
        return None
    try:
        data = json.loads(text)
        if not 0 <= time.time() - data["when"] < _VALID_SECONDS:
            return None
        return read_host_speed(data["host"], where="cache")
    except (ValueError, KeyError, TypeError, InvalidData):
        return None


def _probed(kind: str) -> HostSpeed:
    command = [sys.executable, "-P", "-m", "shardwise.hardware.probe_host", "--device", kind]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InvalidCluster(f"the host probe took longer than {_LIMIT_SECONDS:.0f} s") from error
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidCluster(f"this host cannot be probed: {said}")
    return read_host_speed(json.loads(ended.stdout.splitlines()[-1]), where="the host probe")


def _key(kind: str, *, title: str) -> str:
    """All by which hosts are told apart: machine, processor, cores that this process may use, and what it runs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = [_version(name) for name in ("torch", "shardwise")]
    return json.dumps(
        [kind, title, platform.node(), _processor(), cores, platform.release(), platform.python_version(), *packages]
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
