"""The speed of this machine's host, probed within the last day or now. No torch here.

The probe runs in its own process, so that no GPU memory is held afterwards. Its result is kept in the user's cache
folder for one day: the load of a host changes, and so does the cost of a call with a new torch or driver.
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

from shardwise.base.errors import InvalidCluster, ShardwiseError
from shardwise.base.files.cache_folder import cached_text, keep_text
from shardwise.base.files.data_file import parse_json
from shardwise.hardware.calibration import HostSpeed, read_host_speed
from shardwise.hardware.cluster import Cluster

_KIND = "hosts"
_VALID_SECONDS = 24 * 3600.0
_LIMIT_SECONDS = 120.0


def probed_cluster(cluster: Cluster) -> Cluster:
    """Return the cluster with hosts that are as fast as this one."""
    host = host_here(cluster.device.torch_type, title=cluster.device.name)
    return replace(cluster, device=replace(cluster.device, host=host))


def host_here(kind: str, *, title: str = "") -> HostSpeed:
    """Return how fast this host issues work to a device of `kind` ("cuda" or "cpu") and driver `title`."""
    key = _key(kind, title=title)
    found = _kept(cached_text(_KIND, key))
    if found is None:
        found = _probed(kind)
        keep_text(_KIND, key, json.dumps({"when": time.time(), "host": found.to_data()}))
    return found


def _kept(text: str | None) -> HostSpeed | None:
    """Return the cached speed, unless it is too old or broken."""
    if text is None:
        return None
    try:
        data = parse_json(text)
        if not 0 <= time.time() - data["when"] < _VALID_SECONDS:
            return None
        return read_host_speed(data["host"], where="cache")
    except (ValueError, KeyError, TypeError, ShardwiseError):
        return None


def _probed(kind: str) -> HostSpeed:
    command = [sys.executable, "-P", "-m", "shardwise.hardware.measuring.probe_host", "--device", kind]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InvalidCluster(f"the host probe took longer than {_LIMIT_SECONDS:.0f} s") from error
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidCluster(f"this host cannot be probed: {said}")
    return read_host_speed(parse_json(ended.stdout.splitlines()[-1]), where="the host probe")


def _key(kind: str, *, title: str) -> str:
    """Return what identifies a host: machine, processor, the cores of this process, and its software."""
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
