"""Claims about speed, and about memory that is paid for with speed."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

from claim_rows.claim import Check, Claim, gb, near
from claim_rows.planned import OPTIMIZER, planned, recommended, samples_per_s, source_of

from shardwise.hardware import cluster_of
from shardwise.models.catalogue import shape_of
from shardwise.models.specs.states_only import states_only
from shardwise.plan import Plan
from shardwise.planner.search.candidates import cost
from shardwise.planner.search.recommend import PAIR_BAND
from shardwise.program import Kind, build

_COLLECTIVES = (Kind.GATHER, Kind.REDUCE)


def four_times_larger() -> Claim:
    """The largest model that fits, and what a step then sends."""
    cluster = "4xh100-80gb"
    largest = {strategy: _largest(strategy, cluster=cluster) for strategy in ("ddp", "fsdp")}
    ratio = largest["fsdp"] / largest["ddp"]
    model = "gpt-1.3b"
    counts: dict[str, int] = {}
    sent: dict[tuple[str, str], int] = {}
    for strategy in ("ddp", "fsdp"):
        for precision in ("fp32", "bf16"):
            found = planned(model, strategy=strategy, cluster=cluster, micro_batch=1, precision=precision)
            program = build(source_of(model).spec_for(found.plan), plan=found.plan)
            counts[strategy] = sum(operation.kind in _COLLECTIVES for operation in program.operations())
            sent[strategy, precision] = found.sent_bytes
    more = counts["fsdp"] / counts["ddp"]
    bytes_more = {precision: sent["fsdp", precision] / sent["ddp", precision] for precision in ("fp32", "bf16")}
    rows = [
        (
            f"`{name}`",
            f"{largest[name] / 1e9:.1f}",
            str(counts[name]),
            *(gb(sent[name, precision]) for precision in ("fp32", "bf16")),
        )
        for name in ("ddp", "fsdp")
    ]
    is_larger = near(ratio, 4, share=0.1)
    return Claim(
        said="FSDP trains models 4× larger on 4 GPUs, for 2–3× as many collectives.",
        number=f"{ratio:.1f}× larger; {more:.1f}× as many collectives, but {bytes_more['fp32']:.2f}× the bytes in fp32 "
        f"and {bytes_more['bf16']:.2f}× in bf16 ({model})",
        checks=[
            Check(when="collectives are counted", holds=is_larger and 2 <= more <= 3),
            *(
                Check(when=f"bytes are counted, in {precision}", holds=is_larger and 2 <= share <= 3)
                for precision, share in bytes_more.items()
            ),
        ],
        head=(
            cluster,
            "largest model, B parameters",
            f"collectives per step of {model}",
            "GB sent, fp32",
            "GB sent, bf16",
        ),
        rows=rows,
        source="Predicted: `shardwise plan params:N` by bisection over N in bf16 with AdamW, states only; collectives "
        f"are counted in the step program, bytes in `shardwise plan {model} --cluster {cluster} --json`.",
        comment="DDP's all-reduce sends every gradient twice, in fp32. FSDP gathers parameters twice in the precision "
        "that computes, and sends every gradient once. It trains slightly more than 4 × because DDP also keeps a "
        "whole bf16 copy of the parameters.",
    )


def _largest(strategy: str, *, cluster: str) -> float:
    """Parameters, to 1%."""
    low, high = 1e8, 1e12
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        spec = states_only(f"params:{int(middle)}")
        plan = Plan(strategy=strategy, precision="bf16", micro_batch=1)
        found = cost(spec, plan=plan, cluster=cluster_of(cluster), optimizer=OPTIMIZER, quick=True)
        low, high = (middle, high) if found.fits == "yes" else (low, middle)
    return low


_LADDER = ("gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b", "mpt-3b", "mpt-7b", "mpt-13b")


def best_below() -> Claim:
    """Up to which size the planner takes ddp."""
    clusters = ("8xa100-40gb", "8xa100-80gb", "8xh200")
    sizes = {model: shape_of(model).num_params for model in _LADDER}
    chosen = {cluster: {model: recommended(model, cluster=cluster) for model in _LADDER} for cluster in clusters}
    rows = [
        (model, f"{sizes[model] / 1e9:.2f}", *(f"`{chosen[cluster][model]}`" for cluster in clusters))
        for model in _LADDER
    ]

    def holds(cluster: str, *, limit: float) -> bool:
        """All that is smaller takes ddp, and nothing that is larger by half does."""
        took = {model: chosen[cluster][model] == "ddp" for model in _LADDER}
        below = [took[model] for model in _LADDER if sizes[model] <= limit]
        above = [took[model] for model in _LADDER if sizes[model] > 1.5 * limit]
        return all(below) and not any(above)

    thresholds = [max((sizes[m] for m in _LADDER if chosen[c][m] == "ddp"), default=0) for c in clusters]
    return Claim(
        said="DDP is best for models below 2–3B parameters; or, in other guides, below a few hundred million.",
        number="the largest model for which the planner takes `ddp`: "
        + ", ".join(f"{size / 1e9:.2f}B on {cluster}" for cluster, size in zip(clusters, thresholds, strict=True)),
        checks=[
            *(Check(when=f"the limit is 2.5B on {cluster}", holds=holds(cluster, limit=2.5e9)) for cluster in clusters),
            *(Check(when=f"the limit is 0.4B on {cluster}", holds=holds(cluster, limit=4e8)) for cluster in clusters),
        ],
        head=("model", "B parameters", *clusters),
        rows=rows,
        source="Predicted: `shardwise plan MODEL --cluster CLUSTER`, bf16, AdamW, each strategy at its largest "
        "micro-batch; the recommended strategy is the fastest that fits, or a simpler one within 5% of it "
        "that leaves 8% of the memory. A limit "
        "holds if all models up to it get `ddp` and none more than 1.5 times as large does.",
        comment="The limit depends on the GPU's memory, not on the model: 18 bytes per parameter (bf16) and the "
        "activations of one sample have to fit.",
    )


def between_the_two() -> Claim:
    """SHARD_GRAD_OP against both ends, over fast links and slow ones."""
    cases = (("gpt2-124m", 4), ("gpt-1.3b", 2), ("vit-large", 32), ("resnet50", 64))
    names = ("ddp", "shard_grad_op", "fsdp")
    rows: list[tuple[str, ...]] = []
    saved: list[float] = []
    ahead: dict[str, list[float]] = {"fast": [], "slow": []}
    for links, cluster in (("fast", "8xa100-80gb"), ("slow", "2x8xa100-80gb@eth-25")):
        for model, batch in cases:
            found = [planned(model, strategy=name, cluster=cluster, micro_batch=batch) for name in names]
            peaks = [one.memory.allocated_bytes for one in found]
            speeds = [samples_per_s(one) for one in found]
            rows.append((f"{model}, batch {batch}, {cluster}", *map(gb, peaks), *(f"{speed:,.0f}" for speed in speeds)))
            saved.append(1 - peaks[1] / peaks[0])
            ahead[links].append(speeds[1] / speeds[2] - 1)
    number = (
        f"{min(saved):.0%} to {max(saved):.0%} less memory; {min(ahead['fast']):+.1%} to {max(ahead['fast']):+.1%} "
        f"speed over NVLink, {min(ahead['slow']):+.0%} to {max(ahead['slow']):+.0%} over 25-gigabit Ethernet"
    )
    checks = [Check(when="memory is compared", holds=min(saved) > 0)]
    checks += [
        Check(when=f"speed is compared over {links} links", holds=statistics.median(shares) > PAIR_BAND)
        for links, shares in ahead.items()
    ]
    heads = ("DDP", "SHARD_GRAD_OP", "FULL_SHARD")
    return Claim(
        said="SHARD_GRAD_OP takes less memory than DDP and is faster than FULL_SHARD.",
        number=number,
        checks=checks,
        head=("bf16, AdamW", *(f"{name} GB" for name in heads), *(f"{name} samples/s" for name in heads)),
        rows=rows,
        source="Predicted: `shardwise plan MODEL --cluster CLUSTER --micro-batch N`. 'Faster' means a median lead over "
        f"the models of more than {PAIR_BAND:.0%}, the smallest difference that the planner can resolve on one "
        "cluster. Measured: ViT-Large on two ranks takes less with SHARD_GRAD_OP than with DDP "
        "([table](measured-speed.md#the-accelerate-pair)).",
        comment="SHARD_GRAD_OP saves one gather per unit. Over fast links that gather is hidden behind compute.",
    )


def larger_batch() -> Claim:
    """Each at its own largest micro-batch."""
    cluster = "8xa100-40gb"
    models = ("gpt2-124m", "gpt2-774m", "gpt-1.3b", "gpt2-1.5b")
    rows, checks = [], []
    for model in models:
        found = {name: planned(model, strategy=name, cluster=cluster) for name in ("ddp", "fsdp")}
        if found["ddp"].fits != "yes":
            rows.append(
                (model, "does not fit", str(found["fsdp"].batch), "–", f"{samples_per_s(found['fsdp']):,.1f}", "–")
            )
            checks.append(Check(when=f"{model} is trained", holds=found["fsdp"].fits == "yes"))
            continue
        speeds = {name: samples_per_s(one) for name, one in found.items()}
        ratio = speeds["fsdp"] / speeds["ddp"]
        rows.append(
            (
                model,
                *(str(one.batch) for one in found.values()),
                *(f"{s:,.1f}" for s in speeds.values()),
                f"{ratio:.2f}",
            )
        )
        checks.append(Check(when=f"{model} is trained", holds=ratio > 1 + PAIR_BAND))
    return Claim(
        said="For large models FSDP is faster than DDP, when the memory that it saves buys a larger batch.",
        number=f"FSDP is more than {PAIR_BAND:.0%} faster, or the only one that fits, for "
        f"{sum(check.holds for check in checks)} of {len(checks)} models on {cluster}",
        checks=checks,
        head=("model", "ddp batch", "fsdp batch", "ddp samples/s", "fsdp samples/s", "fsdp / ddp"),
        rows=rows,
        source=f"Predicted: `shardwise plan MODEL --cluster {cluster}`, bf16, AdamW; each strategy at its largest "
        f"micro-batch. The planner can resolve differences of {PAIR_BAND:.0%} on one cluster.",
    )


_FABRICS = ("eth-25", "eth-100", "ib-1x200", "ib-8x200")
_NODES = "2x8xa100-80gb"
# Axis → precision, and (model, cluster, micro-batch) along it.
_AXES = {
    "models get larger, in bf16": (
        "bf16",
        [(model, "8xa100-80gb", 1) for model in ("gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b")],
    ),
    "links get faster, in fp32": ("fp32", [("gpt-1.3b", f"{_NODES}@{fabric}", 1) for fabric in _FABRICS]),
    "batches get larger, in fp32 over slow links": (
        "fp32",
        [("gpt-1.3b", f"{_NODES}@eth-25", batch) for batch in (1, 2, 4, 8)],
    ),
    "links get faster, in bf16": ("bf16", [("gpt-1.3b", f"{_NODES}@{fabric}", 1) for fabric in _FABRICS]),
}


def narrowing_gap() -> Claim:
    """How far DDP is ahead, at the same micro-batch, along several axes."""
    rows, checks, spans = [], [], []
    for axis, (precision, cases) in _AXES.items():
        leads = [_lead(model, cluster=cluster, batch=batch, precision=precision) for model, cluster, batch in cases]
        for (model, cluster, batch), lead in zip(cases, leads, strict=True):
            rows.append((f"{model}, {precision}, batch {batch}, {cluster}", f"{lead:+.1%}"))
        checks.append(Check(when=axis, holds=leads[0] > PAIR_BAND and _falls(leads)))
        spans.append(f"{leads[0]:+.0%} → {leads[-1]:+.0%} ({axis})")
    return Claim(
        said="The gap in throughput between DDP and FSDP narrows with larger models, faster links and larger batches.",
        number=f"DDP's lead: {', '.join(spans)}",
        checks=checks,
        head=("setting", "DDP is ahead by"),
        rows=rows,
        source="Predicted: `shardwise plan MODEL --cluster CLUSTER --micro-batch N --precision fp32|bf16`, AdamW; all "
        f"ranks shard. It holds where DDP is ahead at first, and its lead shrinks, by more than {PAIR_BAND:.0%} each: "
        "the smallest difference that the planner can resolve on one cluster.",
        comment="Below 0, FSDP is ahead. In bf16 both send about as many bytes (claim 5), FSDP can hide them behind "
        "forward and backward instead of backward alone, and each rank updates a slice instead of everything. So there "
        "it is often ahead from the start.",
    )


def _lead(model: str, *, cluster: str, batch: int, precision: str) -> float:
    ddp, fsdp = (
        samples_per_s(planned(model, strategy=name, cluster=cluster, micro_batch=batch, precision=precision))
        for name in ("ddp", "fsdp")
    )
    return 1 - fsdp / ddp


def _falls(leads: Sequence[float]) -> bool:
    """From the first to the last, and nowhere up again, as far as two predictions can tell."""
    never_up = all(later <= earlier + PAIR_BAND for earlier, later in pairwise(leads))
    return never_up and leads[-1] < leads[0] - PAIR_BAND
