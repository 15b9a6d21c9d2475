"""Published scaling curves: throughput per device at the far end, as a share of that at the near end.

    python benchmarks/scaling_curves.py

Only the two ends of each are published here, as shares; what is not given (micro-batches, links) is assumed below.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from published_rows import own_model

from shardwise.hardware import cluster_of
from shardwise.hardware.software import software_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.time.step_time import estimate_time
from shardwise.sources import Source

_TORCH = Plan(strategy="fsdp", engine="torch", precision="bf16")
_MPT = replace(_TORCH, reduce_dtype="bf16", accumulate_reduced=True, micro_batch=6)
_MPT_70B = replace(_MPT, micro_batch=8, recompute="full")
_HYBRID = replace(_TORCH, recompute="full", micro_batch=1, accumulate=4)
_BERT = Plan(strategy="ddp", engine="torch", precision="fp16", micro_batch=256)
_H100, _A100 = "8xh100-80gb", "8xa100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """`near`, `far`: the cluster and the plan at each end; `published`: the share at the far one."""

    name: str
    model: str
    near: tuple[str, Plan]
    far: tuple[str, Plan]
    published: float
    software: str = "2023"

    def predicted(self) -> float:
        return self._each(*self.far) / self._each(*self.near)

    def _each(self, text: str, plan: Plan) -> float:
        """Return samples per second per device."""
        cluster = cluster_of(text)
        cluster = replace(cluster, device=replace(cluster.device, software=software_of(self.software)))
        found = estimate_time(Source(self.model).spec_for(plan), plan=plan, cluster=cluster)
        assert found is not None
        return found.samples_per_s / cluster.num_ranks


def _hybrid(num_ranks: int) -> tuple[str, Plan]:
    plan = replace(_HYBRID, mesh=Mesh(replicate=num_ranks // 128, shard=128))
    return f"{num_ranks // 8}x{_H100}@ib-8x400", plan


CURVES = (
    Curve(
        name="MPT-7B, FSDP, 8 to 512 H100",
        model="mpt-7b",
        near=(_H100, _MPT),
        far=(f"64x{_H100}@roce-8x400", _MPT),
        published=0.909,
    ),
    Curve(
        name="MPT-70B, FSDP, 128 to 512 H100",
        model="mpt-70b",
        near=(f"16x{_H100}@roce-8x400", _MPT_70B),
        far=(f"64x{_H100}@roce-8x400", _MPT_70B),
        published=0.952,
    ),
    Curve(
        name="Llama-3-70B, hybrid sharding over 128, 128 to 2,048 H100",
        model="llama-3.1-70b",
        near=_hybrid(128),
        far=_hybrid(2048),
        software="current",
        published=0.979,
    ),
    Curve(
        name="BERT-Large, DDP, 8 to 256 A100",
        model=own_model("bert_pretraining"),
        near=(_A100, replace(_BERT, accumulate=32)),
        far=(f"32x{_A100}@ib-8x200", replace(_BERT, accumulate=1)),
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
