"""The error band of a time prediction, by the facts of the case. No torch here.

A fact's part contains nine of ten rows of its kind, beyond the parts before it, among the rows that constants were
fitted to (benchmarks/validate_time.py --published DIR prints how many of the held-out rows are inside). Parts are
independent of each other: the band is the root of the sum of their squares.

A step over another fabric: how long it takes where the network is only assumed, and the bandwidth that it needs.

A cluster without a fabric is taken to have that of its maker's own machine. Others have less: AWS p4d has 400 Gb/s for
eight A100s, DGX A100 1,600; published trainings on A100s over 400 and 800 Gb/s are IBM's and Yandex'.
"""

from dataclasses import dataclass, replace
from math import hypot

from shardwise.hardware import Cluster, Device, Fabric
from shardwise.hardware.borrowed import USUAL
from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.device import CURRENT, device_of
from shardwise.hardware.sourced import Sourced
from shardwise.plan import Plan
from shardwise.planner.job import Job
from shardwise.planner.systems import OWN, System
from shardwise.planner.time.step_time import time_job

CALIBRATED = "kernels calibrated"
BORROWED = "extrapolated from an H200, same architecture"
BORROWED_FAR = "extrapolated from an H200, another architecture"
BORROWED_NEW = "extrapolated from an H200, not validated"
BORROWED_UNSEEN = "extrapolated from an H200 to an architecture of which no training was compared"
NODES = "across nodes"
COMPILED = "compiled"
HOST_MEASURED = "bound by the host"
HOST = "bound by a host that was not measured"
FP8 = "fp8 products assumed twice as fast as bf16's, not measured"
OFFLOADED = "through host memory, which was only measured on an H200"
FOREIGN = "an engine of which only the extra time is modelled"

PARTS = {
    CALIBRATED: 0.06,
    BORROWED: 0.07,
    BORROWED_FAR: 0.11,
    BORROWED_NEW: 0.2,
    BORROWED_UNSEEN: 0.5,
    NODES: 0.08,
    COMPILED: 0.06,
    HOST_MEASURED: 0.08,
    HOST: 0.35,
    FP8: 0.25,
    OFFLOADED: 0.2,
    FOREIGN: 0.2,
}
"""Fact → share of the time. Those of hosts and engines are wide: hosts differ by a factor of two. That of fp8 is not
from rows: a device that `calibrate` has measured does not have it."""

UNSEEN_SLOWER = 0.75
"""What a step may take beyond that on an architecture of which no training was compared: its libraries may be far from
what its data sheet promises. The published bf16 rows of Blackwell took 1.7 to 2.6 times as long as predicted."""

CHECKED = ("h200", "h100-80gb", "a100-40gb", "a100-80gb", "v100-32gb")
"""Devices with enough rows to fit or validate constants."""

HOST_BOUND = 0.9
"""If the CPU takes this share of a step, a slower CPU would bound it."""


@dataclass(frozen=True, slots=True)
class TimeBand:
    """`facts`: its parts, the widest first. `slower`: how much longer a step is over the slowest fabric that an assumed
    one stands for, as a share of it.
    """

    facts: tuple[str, ...]
    slower: float = 0.0

    @property
    def is_of_a_measured_kind(self) -> bool:
        """Return whether a training on the device's architecture was compared with its prediction."""
        return BORROWED_UNSEEN not in self.facts

    @property
    def value(self) -> float:
        """The larger of the two sides."""
        return self.upper

    @property
    def lower(self) -> float:
        return hypot(*(PARTS[fact] for fact in self.facts))

    @property
    def upper(self) -> float:
        unseen = UNSEEN_SLOWER if BORROWED_UNSEEN in self.facts else 0.0
        return (1 + self.lower) * (1 + unseen) * (1 + self.slower) - 1

    def __str__(self) -> str:
        if round(100 * self.upper) == round(100 * self.lower):
            return f"± {self.lower:.0%} ({', '.join(self.facts)})"
        facts = (*self.facts, "the fabric is assumed") if self.slower else self.facts
        return f"-{self.lower:.0%} to +{self.upper:.0%} ({', '.join(facts)})"


def time_band(
    *, plan: Plan, cluster: Cluster, host_share: float, system: System = OWN, slower: float = 0.0
) -> TimeBand:
    """Return the band of a plan on a cluster.

    host_share   the CPU's time to issue the step, as a share of the step
    system       the one that runs it
    slower       see TimeBand
    """
    facts = [kernels_fact(cluster.device)]
    if cluster.num_nodes > 1:
        facts.append(NODES)
    if plan.compiler == "inductor":
        facts.append(COMPILED)
    if host_share > HOST_BOUND and cluster.device.name != "cpu":
        # Probed, or calibrated in the user's own file, and so on the user's own host.
        is_known = cluster.device.host is not None or cluster.device.calibration is not None
        facts.append(HOST_MEASURED if is_known else HOST)
    if plan.has_fp8 and not _has_fp8_points(cluster.device, recipe=plan.fp8_recipe):
        facts.append(FP8)
    if plan.offload_states or plan.offload_activations:
        facts.append(OFFLOADED)
    if system.is_foreign:
        facts.append(FOREIGN)
    return TimeBand(tuple(sorted(facts, key=lambda fact: -PARTS[fact])), slower=slower)


def _has_fp8_points(device: Device, *, recipe: str) -> bool:
    known = device.calibration or shipped_calibration(device.name) or shipped_calibration(USUAL)
    key = f"matmul forward{' rowwise' if recipe == 'rowwise' else ''} fp8"
    return known is not None and key in known.reach


def kernels_fact(device: Device) -> str:
    if device.calibration is not None:
        return CALIBRATED
    if shipped_calibration(device.name) is not None:
        # It was calibrated with today's kernels.
        return CALIBRATED if device.software == CURRENT else BORROWED
    if device.name not in CHECKED:
        is_seen = device.architecture in {device_of(name).architecture for name in CHECKED}
        return BORROWED_NEW if is_seen else BORROWED_UNSEEN
    return BORROWED if device.architecture == device_of(USUAL).architecture else BORROWED_FAR


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
