"""Published scaling curves: throughput per device at each point, as a share of that at the first.

    python benchmarks/scaling_curves.py             the curves, and the worst point of each
    python benchmarks/scaling_curves.py --fit       fits the pauses of planner/time/collective.py to all of them, and to
                                                    those of other models than each, which then is predicted

Published here as shares; what is not given (micro-batches, links) is assumed below.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from unittest.mock import patch

from published_rows import own_model

from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.device import software_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.time import collective
from shardwise.planner.time.collective import rings_of
from shardwise.planner.time.step_time import estimate_time

_TORCH = Plan(strategy="fsdp", engine="torch", precision="bf16")
_MPT = replace(_TORCH, reduce_dtype="bf16", accumulate_reduced=True)
_HYBRID = replace(_TORCH, recompute="full", micro_batch=1, accumulate=4)
_H100, _A100 = "8xh100-80gb", "8xa100-80gb"
# Of the search for the constants: share, and seconds of a pause.
_SHARES = tuple(number * 4e-5 for number in range(10, 65))
_PAUSES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`share`: of the throughput per device at the first point of its curve."""

    cluster: str
    plan: Plan
    share: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    model: str
    points: tuple[Point, ...]
    software: str = "2023"
    matmul: str = "highest"

    @cached_property
    def _alone(self) -> list[tuple[float, float, Cluster, Plan]]:
        """Per point: seconds of a step without a wait, samples of a device, cluster, plan."""
        found = []
        for point in self.points:
            cluster = cluster_of(point.cluster)
            device = replace(cluster.device, software=software_of(self.software), matmul_precision=self.matmul)
            cluster = replace(cluster, device=device)
            time = estimate_time(Model(self.model).spec_for(point.plan), plan=point.plan, cluster=cluster)
            assert time is not None
            samples = time.samples_per_s * time.step_seconds / cluster.num_ranks
            found.append((time.step_seconds - time.straggler_seconds, samples, cluster, point.plan))
        return found

    def predicted(self) -> list[float]:
        """Return the share at each point, with the constants as they are now."""
        rates = []
        for alone, samples, cluster, plan in self._alone:
            mesh = plan.mesh or Mesh(shard=cluster.num_ranks)
            gathers = plan.strategy == "fsdp"
            rings = rings_of(mesh, cluster=cluster)
            waited = collective.straggler_seconds(alone, rings=rings, cluster=cluster, gathers=gathers)
            rates.append(samples / (alone + waited))
        return [rate / rates[0] for rate in rates]

    def errors(self) -> list[float]:
        return [found - point.share for found, point in zip(self.predicted(), self.points, strict=True)]


def _mpt(plan: Plan, *shares: tuple[int, float]) -> tuple[Point, ...]:
    return tuple(
        Point(cluster=_H100 if nodes == 1 else f"{nodes}x{_H100}@roce-8x400", plan=plan, share=share)
        for nodes, share in shares
    )


def _hybrid(nodes: int, share: float) -> Point:
    plan = replace(_HYBRID, mesh=Mesh(replicate=nodes // 16, shard=128))
    return Point(cluster=f"{nodes}x{_H100}@ib-8x400", plan=plan, share=share)


def _bert(precision: str, micro_batch: int, *, passes: int, shares: Sequence[float]) -> tuple[Point, ...]:
    """One to 32 nodes; the global batch stays, so that passes get fewer."""
    plan = Plan(strategy="ddp", engine="torch", precision=precision, micro_batch=micro_batch)
    return tuple(
        Point(
            cluster=_A100 if nodes == 1 else f"{nodes}x{_A100}@ib-8x200",
            plan=replace(plan, accumulate=passes // nodes),
            share=share,
        )
        for nodes, share in zip((1, 2, 4, 8, 16, 32), shares, strict=True)
    )


CURVES = (
    Curve(
        name="MPT-7B, FSDP, 8 to 512 H100",
        model="mpt-7b",
        points=_mpt(replace(_MPT, micro_batch=6), (1, 1.0), (16, 0.984), (64, 0.909)),
    ),
    Curve(
        name="MPT-1B, FSDP, 128 to 512 H100",
        model="mpt-1b",
        points=_mpt(replace(_MPT, micro_batch=12), (16, 1.0), (64, 0.903)),
    ),
    Curve(
        name="MPT-70B, FSDP, 128 to 512 H100",
        model="mpt-70b",
        points=_mpt(replace(_MPT, micro_batch=8, recompute="full"), (16, 1.0), (64, 0.952)),
    ),
    Curve(
        name="Llama-3-70B, hybrid sharding over 128, 128 to 2,048 H100",
        model="llama-3.1-70b",
        points=(_hybrid(16, 1.0), _hybrid(256, 0.979)),
        software="current",
    ),
    Curve(
        name="BERT-Large, DDP, fp16, 8 to 256 A100",
        model=own_model("bert_pretraining"),
        points=_bert("fp16", 256, passes=32, shares=(1.0, 1.009, 0.995, 0.982, 0.968, 0.949)),
    ),
    Curve(
        name="BERT-Large, DDP, TF32, 8 to 256 A100",
        model=own_model("bert_pretraining"),
        points=_bert("fp32", 128, passes=64, shares=(1.0, 1.001, 0.991, 0.996, 0.977, 0.952)),
        matmul="high",
    ),
)


def table() -> Iterator[str]:
    yield "| curve | at the far end: published | predicted | worst point |"
    yield "|---|---|---|---|"
    for curve in CURVES:
        worst = max(curve.errors(), key=abs)
        yield (
            f"| {curve.name} | {curve.points[-1].share:.3f} | {curve.predicted()[-1]:.3f} | {100 * worst:+.1f} points |"
        )


def fit(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the share and the length of pauses with the least squares of errors."""

    def squares(constants: tuple[float, float]) -> float:
        with with_constants(*constants):
            return sum(error**2 for curve in curves for error in curve.errors())

    return min(product(_SHARES, _PAUSES), key=squares)


def with_constants(share: float, seconds: float) -> "patch.multiple":  # type: ignore[valid-type]
    return patch.multiple(collective, PAUSED_SHARE=share, PAUSE_SECONDS=seconds)


def fitted() -> Iterator[str]:
    yield f"all curves: share {fit(CURVES)[0]:.5f}, pauses of {fit(CURVES)[1]} s"
    for curve in CURVES:
        share, seconds = fit([other for other in CURVES if other.model != curve.model])
        with with_constants(share, seconds):
            worst = max(curve.errors(), key=abs)
        yield f"without {curve.name}: share {share:.5f}, pauses of {seconds} s, its worst point {100 * worst:+.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants, also leaving one curve out")
    print("\n".join(fitted() if parser.parse_args().fit else table()))
