"""The figures that a guide gives for ViT-Large on two A100, predicted, and measured as far as they were."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from claim_rows.claim import Check, Claim, gb, near
from claim_rows.planned import planned, samples_per_s

from shardwise.planner.search.candidates import Candidate

_RESULTS = Path(__file__).parents[1] / "results"


def vit_large() -> Claim:
    """What was published, predicted, and measured on one card that two ranks share."""
    cluster, said = "2xa100-40gb", {"ddp": (18e9, 450.0), "fsdp": (10e9, 380.0)}
    batch = min(
        range(8, 129),
        key=lambda n: abs(_torch("ddp", cluster=cluster, batch=n).memory.allocated_bytes - said["ddp"][0]),
    )
    predicted = {name: _torch(name, cluster=cluster, batch=batch) for name in said}
    measured = _accelerate_cases()
    rows = [(f"claimed: {name}", "–", gb(size), f"{speed:.0f}") for name, (size, speed) in said.items()]
    rows += [
        (f"predicted: {name}", str(batch), gb(one.memory.allocated_bytes), f"{samples_per_s(one):.0f}")
        for name, one in predicted.items()
    ]
    rows += [(f"measured: {case['name']}", str(case["batch_size"]), gb(_peak(case)), "–") for case in measured]
    ours = predicted["fsdp"]
    ratios = samples_per_s(predicted["fsdp"]) / samples_per_s(predicted["ddp"])
    saved = [1 - _peak(other) / _peak(ddp) for ddp, other in _pairs(measured)]
    return Claim(
        said="ViT-Large on 2×A100: 18 → 10 GB per GPU, 450 → 380 samples/s.",
        number=f"at the batch at which DDP takes 18 GB ({batch}), FSDP takes {gb(ours.memory.allocated_bytes)} GB, at "
        f"{ratios:.2f} × the speed (claimed: {380 / 450:.2f} ×); measured savings {min(saved):.0%} to {max(saved):.0%} "
        "(claimed: 44%)",
        checks=[
            Check(
                when="only the memory is looked at",
                holds=near(ours.memory.allocated_bytes, said["fsdp"][0], share=0.1),
            ),
            Check(
                when="only the loss of speed is looked at",
                holds=near(ratios, 380 / 450, share=predicted["fsdp"].time_band.value),
            ),
        ],
        head=("ViT-Large", "batch per GPU", "GB per GPU", "samples/s"),
        rows=rows,
        source="Predicted: `shardwise plan vit-large --cluster 2xa100-40gb --engine torch --micro-batch N`, bf16. "
        "Measured: two NCCL ranks that share one H200 ([results](../benchmarks/results/accelerate_vit.json), "
        "`python benchmarks/accelerate_vit.py`); their speed is not that of two GPUs, so it is omitted.",
        comment="Parameters, optimizer state, DDP's buckets and autocast's copies explain a saving of 3.6 GB at any "
        "batch ([account](measured-speed.md#the-accelerate-pair)).",
    )


def _torch(strategy: str, *, cluster: str, batch: int) -> Candidate:
    return planned("vit-large", strategy=strategy, cluster=cluster, micro_batch=batch, engine="torch")


def _accelerate_cases() -> list[dict[str, Any]]:
    found = json.loads((_RESULTS / "accelerate_vit.json").read_text())["cases"]
    return [case for case in found if case["name"] in ("ddp", "fsdp_full_shard")]


def _peak(case: dict[str, Any]) -> float:
    return statistics.median(rank["peak_allocated_bytes"] for rank in case["ranks"])


def _pairs(cases: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for ddp in cases:
        if ddp["name"] == "ddp":
            yield from ((ddp, one) for one in cases if one is not ddp and one["batch_size"] == ddp["batch_size"])
