"""Published scaling curves: throughput per device at the far end, as a share of that at the near end.

    python benchmarks/scaling_curves.py

Only the two ends of each are published here, as shares; what is not given (micro-batches, links) is assumed below.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from published_rows import own_model

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.time.step_time import estimate_time
from shardwise.sources import Source

_MPT = Plan(
    strategy="fsdp", engine="torch", precision="bf16", reduce_dtype="bf16", accumulate_reduced=True, micro_batch=6
)
_HYBRID = Plan(strategy="fsdp", engine="torch", precision="bf16", recompute="full", micro_batch=1, accumulate=4)
_BERT = Plan(strategy="ddp", engine="torch", precision="fp16", micro_batch=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """`ends`: the cluster and the plan at the near and the far end; `published`: the share at the far one."""

    name: str
    model: str
    ends: tuple[tuple[str, Plan], tuple[str, Plan]]
    software: str
    published: float

    def predicted(self) -> float:
        near, far = (self._each(cluster, plan) for cluster, plan in self.ends)
        return far / near

    def _each(self, text: str, plan: Plan) -> float:
        """Samples per second per device."""
        cluster = cluster_of(text)
        cluster = replace(cluster, device=replace(cluster.device, software=self.software))
        found = estimate_time(Source(self.model).spec_for(plan), plan=plan, cluster=cluster)
        assert found is not None
        return found.samples_per_s / cluster.num_ranks


def _hybrid(num_ranks: int) -> Plan:
    return replace(_HYBRID, mesh=Mesh(replicate=num_ranks // 128, shard=128))


CURVES = (
    Curve(
        name="MPT-7B, FSDP, 8 to 512 H100",
        model="mpt-7b",
        ends=(("8xh100-80gb", _MPT), ("64x8xh100-80gb@roce-8x400", _MPT)),
        software="2023",
        published=0.909,
    ),
    Curve(
        name="MPT-70B, FSDP, 128 to 512 H100",
        model="mpt-70b",
        ends=(
            ("16x8xh100-80gb@roce-8x400", replace(_MPT, micro_batch=8, recompute="full")),
            ("64x8xh100-80gb@roce-8x400", replace(_MPT, micro_batch=8, recompute="full")),
        ),
        software="2023",
        published=0.952,
    ),
    Curve(
        name="Llama-3-70B, hybrid sharding over 128, 128 to 2,048 H100",
        model="llama-3.1-70b",
        ends=(("16x8xh100-80gb@ib-8x400", _hybrid(128)), ("256x8xh100-80gb@ib-8x400", _hybrid(2048))),
        software="current",
        published=0.979,
    ),
    Curve(
        name="BERT-Large, DDP, 8 to 256 A100",
        model=own_model("bert_pretraining"),
        ends=(
            ("8xa100-80gb", replace(_BERT, accumulate=32)),
            ("32x8xa100-80gb@ib-8x200", replace(_BERT, accumulate=1)),
        ),
        software="2023",
        published=0.949,
    ),
)


def table() -> Iterator[str]:
    yield "| curve | published | predicted | points |"
    yield "|---|---|---|---|"
    for curve in CURVES:
        predicted = curve.predicted()
        yield f"| {curve.name} | {curve.published:.3f} | {predicted:.3f} | {100 * (predicted - curve.published):+.1f} |"


if __name__ == "__main__":
    print("\n".join(table()))
