"""A step over another fabric: how long it takes where the network is only assumed, and the bandwidth that it needs.

A cluster without a fabric is taken to have that of its maker's own machine. Others have less: AWS p4d has 400 Gb/s for
eight A100s, DGX A100 1,600; published trainings on A100s over 400 and 800 Gb/s are IBM's and Yandex'.
"""

from dataclasses import replace

from shardwise.hardware import Cluster, Fabric
from shardwise.hardware.sourced import Sourced
from shardwise.planner.job import Job
from shardwise.planner.systems import System
from shardwise.planner.time.step_time import time_job

LEAST_SHARE = 0.25
"""The slowest fabric that an assumed one stands for, as a share of it."""

_BOUND = 1.05
"""A step that takes longer than this, relative to one over a fabric without limits, is bound by communication."""
_UNLIMITED = 1e3
_ROUNDS = 12


def over_slower_fabric(job: Job, *, batch: int, cluster: Cluster, system: System) -> float | None:
    """Return the seconds of a step over the slowest fabric that the assumed one stands for; None if it is known."""
    if not cluster.assumes_fabric:
        return None
    return _seconds(LEAST_SHARE, job, batch=batch, cluster=cluster, system=system)


def needed_bytes_per_s(job: Job, *, batch: int, cluster: Cluster, system: System) -> float | None:
    """Return the bandwidth of a node below which communication bounds a step; None if there is no such limit."""
    if cluster.fabric is None:
        return None

    def seconds(share: float) -> float | None:
        return _seconds(share, job, batch=batch, cluster=cluster, system=system)

    least = seconds(_UNLIMITED)
    if least is None:
        return None
    low, high = 1 / _UNLIMITED, _UNLIMITED
    if (seconds(low) or 0.0) < _BOUND * least:
        return None
    for _ in range(_ROUNDS):
        middle = (low * high) ** 0.5
        if (seconds(middle) or 0.0) < _BOUND * least:
            high = middle
        else:
            low = middle
    return high * cluster.fabric.bytes_per_s


def _seconds(share: float, job: Job, *, batch: int, cluster: Cluster, system: System) -> float | None:
    assert cluster.fabric is not None
    scaled = replace(cluster, fabric=_scaled(cluster.fabric, share=share))
    found = time_job(job, batch=batch, cluster=scaled, system=system)
    return found.step_seconds if found is not None else None


def _scaled(fabric: Fabric, *, share: float) -> Fabric:
    def times(value: Sourced[float]) -> Sourced[float]:
        return replace(value, value=share * value.value)

    link, ring = fabric.link, fabric.link.ring_bytes_per_s
    changed = replace(
        link, bytes_per_s=times(link.bytes_per_s), ring_bytes_per_s=times(ring) if ring is not None else None
    )
    return replace(fabric, link=changed)
