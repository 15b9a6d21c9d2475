"""Hybrid meshes with states sharded over all ranks, beside hybrid sharding and fsdp over all ranks: predictions.

    python benchmarks/axes.py

writes the table of docs/measured-planner.md, "One strategy per axis of a mesh". Nothing in it was measured: the
devices, links and efficiencies are those of the package's tables (src/shardwise/hardware/devices.toml, links.toml).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rows import ROOT, fill, table

from shardwise.base.vocabulary.quantities import GIB, fixed
from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.search.candidates import Candidate, cost

PAGE = ROOT / "docs" / "measured-planner.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of several nodes; one line of the table."""

    model: str
    cluster: str
    passes: int = 1
    reduce_dtype: str = "fp32"


A100 = tuple(f"16x8xa100-40gb@{fabric}" for fabric in ("ib-1x100", "ib-4x100", "ib-8x200"))
JOBS = (
    *(
        Job(model="llama-3.1-8b", cluster=cluster, passes=passes, reduce_dtype=dtype)
        for cluster in A100
        for passes in (1, 8)
        for dtype in ("fp32", "bf16")
    ),
    Job(model="llama-3.1-8b", cluster="64x8xh100-80gb"),
    Job(model="llama-3.1-70b", cluster="8x8xh100-80gb"),
    Job(model="llama-3.1-70b", cluster="8x8xh100-80gb", reduce_dtype="bf16"),
    Job(model="llama-3.1-70b", cluster="32x8xh100-80gb"),
)


def predicted(job: Job, *, across: str | None) -> Candidate:
    """Return fsdp over all ranks, or with a strategy across nodes; where sums of passes do not fit, each reduces."""
    cluster = cluster_of(job.cluster)
    mesh = Mesh(replicate=cluster.num_nodes, shard=cluster.devices_per_node)
    if across is None:
        mesh = Mesh(shard=cluster.num_ranks)
    found = []
    for reduced in (False, True) if job.passes > 1 and across in (None, "ddp") else (False,):
        plan = Plan(
            strategy="fsdp", across=across or "ddp", mesh=mesh, precision="bf16", recompute="full", micro_batch=1,
            accumulate=job.passes, accumulate_reduced=reduced, reduce_dtype=job.reduce_dtype,
        )  # fmt: skip
        spec = Model(job.model, seq=4096).spec_for(plan)
        found.append(cost(spec, plan=plan, cluster=cluster, optimizer="adamw"))
    return next((one for one in found if one.fits != "no"), found[-1])


def lines() -> Iterator[list[str]]:
    for job in JOBS:
        found = [predicted(job, across=across) for across in (None, "ddp", "zero1", "zero2")]
        yield [
            job.model.removeprefix("llama-3.1-").upper(),
            job.cluster,
            str(job.passes),
            job.reduce_dtype,
            *map(_cell, found),
            f"{found[3].samples_per_s / found[0].samples_per_s:.2f}",
        ]


def _cell(one: Candidate) -> str:
    assert one.time is not None
    assert one.time.tokens_per_s_per_gpu is not None
    fits = " (does not fit)" if one.fits == "no" else ""
    return f"{one.time.tokens_per_s_per_gpu:,.0f}, {fixed(one.memory.device_bytes, unit=GIB)}{fits}"


def section() -> str:
    """Return the table of the page."""
    ways = (
        "fsdp over all ranks",
        "fsdp across ddp",
        "fsdp across zero1",
        "fsdp across zero2",
        "across zero2, × over all",
    )
    heads = ("Llama-3.1", "cluster", "passes", "reduced in", *ways)
    return table(heads, list(lines()))


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(), {"axes": section()}))


if __name__ == "__main__":
    main()
