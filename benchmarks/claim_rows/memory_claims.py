"""Claims about memory: what a rank holds, what fits, and how that changes with the number of ranks."""

from dataclasses import replace

from claim_rows.claim import Check, Claim, gb, near
from claim_rows.planned import planned, source_of, state_bytes

from shardwise.hardware import devices
from shardwise.measure.report.snapshots import snapshots_of
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate
from shardwise.program.spec import ModelSpec

_STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")


def hundred_million() -> Claim:
    """P + G + 2P."""
    rows, sums, peaks = [], {}, {}
    for strategy in ("ddp", "fsdp"):
        plan = Plan(strategy=strategy, precision="fp32", micro_batch=1)
        held = state_bytes(source_of("params:100m").spec_for(plan), plan=plan, num_ranks=4)
        sums[strategy] = sum(held.values())
        peaks[strategy] = planned(
            "params:100m", strategy=strategy, cluster="4xh100-80gb", micro_batch=1, precision="fp32"
        ).memory.allocated_bytes
        parts = (held["params"], held["grads"], held["optim"], sums[strategy], peaks[strategy])
        rows.append((f"`{strategy}`", *(f"{size / 1e6:,.0f}" for size in parts)))
    return Claim(
        said="100M parameters in fp32 with Adam are 400 MB of parameters, 400 MB of gradients and 800 MB of optimizer "
        "state: on 4 GPUs 1.6 GB each under DDP, and 0.4 GB each under FSDP.",
        number=f"{gb(sums['ddp'])} GB and {gb(sums['fsdp'])} GB of states; at the peak of a step "
        f"{gb(peaks['ddp'])} GB and {gb(peaks['fsdp'])} GB",
        checks=[
            Check(
                when="parameters, gradients and optimizer state are counted",
                holds=near(sums["ddp"], 1.6e9, share=0.01) and near(sums["fsdp"], 0.4e9, share=0.01),
            ),
            Check(
                when="the peak of a step is counted, without activations",
                holds=near(peaks["ddp"], 1.6e9, share=0.05) and near(peaks["fsdp"], 0.4e9, share=0.05),
            ),
        ],
        head=("MB per rank", "params", "grads", "optim", "sum", "peak of a step"),
        rows=rows,
        source="Predicted: `shardwise plan params:100m --cluster 4xh100-80gb --precision fp32 --json`.",
        comment="The peak also holds gathered parameters, gradients that are being reduced, and workspaces. "
        "Activations come on top; the claim leaves them out too.",
    )


def two_billion() -> Claim:
    """15 to 20 GB: in which precision?"""
    spec = source_of("params:2b").spec_for(Plan())
    in_16_bits = _in_dtype(spec, "bfloat16")
    cases = [
        ("everything is in fp32", spec, Plan(strategy="ddp"), "adamw"),
        ("it computes in bf16 with fp32 weights", spec, Plan(strategy="ddp", precision="bf16"), "adamw"),
        ("everything is in bf16", in_16_bits, Plan(strategy="ddp", precision="native"), "adamw"),
        ("the optimizer is SGD without momentum, in fp32", spec, Plan(strategy="ddp"), "sgd-plain"),
    ]
    rows, checks = [], []
    for name, case, plan, optimizer in cases:
        held = state_bytes(case, plan=plan, num_ranks=1, optimizer=optimizer)
        total = sum(held.values())
        rows.append((name, *(gb(size) for size in held.values()), gb(total)))
        checks.append(Check(when=name, holds=15e9 <= total <= 20e9))
    return Claim(
        said="A model with 2B parameters takes 15–20 GB.",
        number=f"{rows[0][-1]} GB of states in fp32 with AdamW, {rows[2][-1]} GB with everything in bf16",
        checks=checks,
        head=("GB on one GPU", "params", "grads", "optim", "sum"),
        rows=rows,
        source="Predicted by the planner for `params:2b` on one rank: parameters, gradients and optimizer state.",
        comment="bf16 has 8 significant bits: weights that are themselves kept in bf16 lose small updates. Keep fp32 "
        f"weights and compute in bf16, which takes {rows[1][-1]} GB here: it adds a copy of the parameters in bf16.",
    )


def _in_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    units = tuple(
        replace(unit, params=tuple(replace(param, dtype=dtype) for param in unit.params)) for unit in spec.units
    )
    return replace(spec, units=units)


def sixty_billion() -> Claim:
    """No device holds it whole; how many hold it in slices?"""
    whole = planned("params:60b", strategy="ddp", cluster="8xh100-80gb", micro_batch=1)
    capacities = {d.name: d.capacity_bytes.value for d in devices().values() if d.capacity_bytes is not None}
    largest = max(capacities, key=lambda name: capacities[name])
    counts = (8, 16, 32, 64)
    sharded = {
        count: planned("params:60b", strategy="fsdp", cluster=f"{count}xh100-80gb", micro_batch=1) for count in counts
    }
    fitting = [count for count, found in sharded.items() if found.fits == "yes"]
    rows = [("`ddp`, any number", gb(whole.memory.device_bytes), whole.fits)]
    rows += [(f"`fsdp`, {count}", gb(found.memory.device_bytes), found.fits) for count, found in sharded.items()]
    too_large = whole.memory.device_bytes > max(capacities.values())
    least = min(fitting, default=counts[-1])
    return Claim(
        said="A model with 60B parameters is impossible with DDP and feasible with FSDP.",
        number=f"{gb(whole.memory.device_bytes)} GB per GPU under DDP; under FSDP "
        f"{gb(sharded[least].memory.device_bytes)} GB on {least} × H100-80GB",
        checks=[
            Check(
                when=f"FSDP has at least {least} × H100-80GB",
                holds=too_large and fitting == [count for count in counts if count >= least],
            ),
            Check(
                when=f"FSDP has fewer than {least}",
                holds=too_large and all(count in fitting for count in counts if count < least),
            ),
        ],
        head=("H100-80GB, bf16, AdamW", "GB per GPU", "fits"),
        rows=rows,
        source="Predicted: `shardwise plan params:60b --cluster 16xh100-80gb --strategy fsdp`.",
        comment=f"States only. The largest device in our tables is `{largest}`, with {gb(capacities[largest])} GB. "
        "Activations come on top and need room of their own.",
    )


def few_hundred_megabytes() -> Claim:
    """The first training in a list that DDP misses by little."""
    model, cluster, over = _just_too_large()
    batch = over.batch
    ways = {
        f"the micro-batch stays {batch} and everything is kept": over,
        f"the micro-batch becomes {batch // 2}, with twice as many passes": planned(
            model, strategy="ddp", cluster=cluster, micro_batch=batch // 2
        ),
        "activations are recomputed": planned(
            model, strategy="ddp", cluster=cluster, micro_batch=batch, recompute="selective"
        ),
    }
    capacity = over.capacity_bytes
    assert capacity is not None
    others = {
        f"`{name}`": planned(model, strategy=name, cluster=cluster, micro_batch=batch) for name in _STRATEGIES[1:]
    }
    rows = [(f"`ddp`: {name}", gb(found.memory.device_bytes), found.fits) for name, found in ways.items()]
    rows += [
        (f"{name}, nothing else changed", gb(found.memory.device_bytes), found.fits) for name, found in others.items()
    ]
    excess = over.memory.device_bytes - capacity
    return Claim(
        said="A model that needs a few hundred MB more than the GPU has cannot be trained under DDP.",
        number=f"{model} at micro-batch {batch} misses {cluster} by {excess / 1e6:.0f} MB under DDP",
        checks=[Check(when=name, holds=found.fits == "no") for name, found in ways.items()],
        head=(f"{cluster}, {gb(capacity)} GB each", "GB per GPU", "fits"),
        rows=rows,
        source=f"Predicted: `shardwise plan {model} --cluster {cluster} --micro-batch {batch}`.",
        comment="A few hundred MB are mostly activations, which DDP can reduce as well. What DDP cannot reduce is "
        "16 bytes per parameter.",
    )


def _just_too_large() -> tuple[str, str, Candidate]:
    for model, cluster in (("gpt2-350m", "4xa100-40gb"), ("gpt-1.3b", "4xa100-40gb"), ("gpt-1.3b", "4xa100-80gb")):
        for batch in range(2, 65):
            found = planned(model, strategy="ddp", cluster=cluster, micro_batch=batch)
            capacity = found.capacity_bytes
            assert capacity is not None
            if found.memory.device_bytes > capacity + 1e9:
                break
            if found.memory.device_bytes > capacity + 1e8:
                return model, cluster, found
    raise SystemExit("no training misses a device by 0.1 to 1 GB: add one to _just_too_large")


def linear_in_ranks() -> Claim:
    """States shrink with the number of ranks; the peak does not."""
    model, batch = "gpt-1.3b", 2
    counts = (1, 2, 4, 8, 16, 64)
    states, peaks = {}, {}
    for count in counts:
        found = planned(model, strategy="fsdp", cluster=f"{count}xh100-80gb", micro_batch=batch)
        peaks[count] = found.memory.allocated_bytes
        states[count] = sum(
            state_bytes(source_of(model).spec_for(found.plan), plan=found.plan, num_ranks=count).values()
        )

    def linear(sizes: dict[int, int]) -> bool:
        return all(near(sizes[count] * count, sizes[1], share=0.02) for count in counts)

    rows = [(str(count), gb(states[count]), gb(peaks[count])) for count in counts]
    return Claim(
        said="Under FSDP, memory shrinks linearly with the number of GPUs.",
        number=f"from 1 to 64 GPUs, states shrink {states[1] / states[64]:.1f} times and the peak "
        f"{peaks[1] / peaks[64]:.1f} times ({model}, micro-batch {batch})",
        checks=[
            Check(when="parameters, gradients and optimizer state are counted", holds=linear(states)),
            Check(when="the peak of a step is counted", holds=linear(peaks)),
        ],
        head=("GPUs", "GB of states per GPU", "GB at the peak"),
        rows=rows,
        source=f"Predicted: `shardwise plan {model} --cluster 64xh100-80gb --strategy fsdp --micro-batch {batch}`.",
        comment="Activations and the parameters that are gathered for the moment do not depend on the number of GPUs.",
    )


def basic_blocks() -> Claim:
    """ResNet-18 as one unit, and by blocks."""
    from shardwise.models.catalogue import shape_of
    from shardwise.models.make import build_model
    from shardwise.program.units import model_spec

    model = build_model(shape_of("resnet18"), device="meta")
    plan = Plan(strategy="fsdp")
    ways = {"one unit": "none", "each BasicBlock": "class:BasicBlock", "each layer": "leaf"}
    specs = {name: model_spec(model, policy=units) for name, units in ways.items()}
    peaks = {name: snapshots_of(spec, plan=plan, num_ranks=4).peak.held_bytes for name, spec in specs.items()}
    ddp = snapshots_of(specs["one unit"], plan=Plan(strategy="ddp"), num_ranks=4).peak.held_bytes
    rows = [("`ddp`", "–", f"{ddp / 1e6:.1f}")]
    rows += [(f"`fsdp`, {name}", str(len(specs[name].units)), f"{peaks[name] / 1e6:.1f}") for name in ways]
    return Claim(
        said="Wrapping each BasicBlock of a ResNet saves more memory than wrapping the whole ResNet.",
        number=f"{peaks['each BasicBlock'] / 1e6:.1f} MB per rank with a unit per BasicBlock, "
        f"{peaks['one unit'] / 1e6:.1f} MB with one unit",
        checks=[Check(when="FSDP runs on 4 ranks", holds=peaks["each BasicBlock"] < 0.99 * peaks["one unit"])],
        head=("ResNet-18 on 4 ranks, fp32, AdamW", "units", "MB of states at the peak"),
        rows=rows,
        source="Counted in the step program, as `shardwise explain fsdp --model resnet18` does: parameters, gradients "
        "and optimizer state, without activations.",
        comment="As one unit, the whole model is gathered at once, and all of its gradients exist at once.",
    )
