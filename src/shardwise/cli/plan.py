"""`shardwise plan`: predicts memory and speed of every strategy on a cluster, and recommends one."""

import json

from typer import Exit

from shardwise.cli import plan_flags as flags
from shardwise.cli.plan_options import (
    SoftwareOptions,
    check_names,
    hybrid_mesh,
    parse_count,
    parse_host_memory,
    parse_mesh,
    parse_offload,
    parse_recompute,
    parse_tile,
    planned_cluster,
    source_of,
    system_settings,
)
from shardwise.cli.shared_options import (
    AsJson,
    ImageSize,
    LoraRank,
    LoraTargets,
    Optimizer,
    Precision,
    Quantize,
    SampleLength,
    SavedPlan,
    Units,
)
from shardwise.errors import InvalidPlan
from shardwise.plan.policy import AUTO_UNITS
from shardwise.spec.adaptation import adaptation_of
from shardwise.vocabulary.quantities import byte_count


def plan(
    model: flags.Model = None,
    cluster: flags.ClusterName = None,
    fabric_gbps: flags.FabricSpeed = None,
    strategy: flags.Strategy = None,
    micro_batch: flags.MicroBatch = None,
    seq: SampleLength = None,
    image: ImageSize = None,
    precision: Precision = "bf16",
    recompute: flags.Recompute = "none",
    global_batch: flags.GlobalBatch = None,
    accumulate: flags.Accumulate = 1,
    accumulate_reduced: flags.AccumulateReduced = None,
    update: flags.Update = "step",
    mesh: flags.MeshShape = None,
    units: Units = AUTO_UNITS,
    reduce_dtype: flags.ReduceDtype = None,
    budget: flags.Budget = None,
    host_memory: flags.HostMemory = None,
    offload: flags.Offload = None,
    lora: LoraRank = None,
    lora_targets: LoraTargets = None,
    quantize: Quantize = None,
    optimizer: Optimizer = "adamw",
    goal: flags.Goal = "throughput",
    engine: flags.PlannedEngine = None,
    devices: flags.DeviceTable = None,
    software: flags.SoftwarePreset = None,
    attention: flags.Attention = None,
    matmul: flags.Matmul = None,
    norms: flags.Norms = None,
    matmul_precision: flags.MatmulPrecision = None,
    compile_with: flags.Compile = "none",
    capture: flags.Capture = "auto",
    like: flags.Like = "",
    overlap: flags.Overlap = None,
    tile: flags.Tile = None,
    loss: flags.Loss = None,
    here: flags.Here = False,
    tokens: flags.TokenCount = None,
    price: flags.HourlyPrice = None,
    frontier: flags.Frontier = False,
    scale: flags.Scale = False,
    timeline: flags.Timeline = False,
    as_json: AsJson = False,
    save: SavedPlan = None,
    serve: flags.Serve = False,
    port: flags.Port = 8765,
    page: flags.PageFile = None,
) -> None:
    """Predict memory and speed of every strategy, and recommend one."""
    if serve or page is not None:
        from shardwise.cli.plan_page import serve_page, write_page

        if page is not None:
            write_page(page, model=model, cluster=cluster)
        if serve:
            serve_page(model=model, cluster=cluster, seq=seq, image=image, port=port)
        return
    if model is None or cluster is None:
        raise InvalidPlan(
            "plan needs a model and a cluster: shardwise plan llama-3.1-8b --cluster 8xh100-80gb; or a page on which "
            "both are chosen: shardwise plan --serve"
        )
    check_names(goal=goal, optimizer=optimizer)
    from shardwise.cli.plan_answer import PlanQuestion, answer
    from shardwise.cli.plan_output import as_data, show
    from shardwise.plan import Plan

    where = planned_cluster(
        cluster,
        devices=devices,
        software=SoftwareOptions(preset=software, attention=attention, matmul=matmul, norms=norms),
        matmul_precision=matmul_precision,
        here=here,
        fabric_gbps=fabric_gbps,
        host_bytes=parse_host_memory(host_memory, option="--host-memory"),
    )
    chosen = system_settings(
        like, model=model, engine=engine, strategy=strategy, precision=precision, reduce_dtype=reduce_dtype,
        accumulate_reduced=accumulate_reduced, overlap=overlap, loss=loss, tile=parse_tile(tile),
    )  # fmt: skip
    asked = Plan(
        micro_batch=micro_batch,
        accumulate=accumulate,
        accumulate_reduced=chosen.accumulate_reduced,
        update=update,
        mesh=parse_mesh(mesh) or hybrid_mesh(chosen.strategy, cluster=where),
        units=units,
        precision=precision,
        reduce_dtype=chosen.reduce_dtype,
        piece_bytes=0 if chosen.system.is_foreign else None,
        tile=chosen.tile,
        engine=chosen.engine,
        compile=compile_with,
        capture=capture,
        **parse_recompute(recompute),
        **parse_offload(offload),
    )
    adaptation = adaptation_of(lora, targets=lora_targets, quantize=quantize, precision=precision)
    question = PlanQuestion(
        source=source_of(model, seq=seq, image=image, loss=loss, chosen=chosen, adaptation=adaptation),
        plan=asked,
        strategy=chosen.strategy,
        cluster=where,
        optimizer=optimizer,
        goal=goal,
        system=chosen.system,
        like=chosen.text,
        budget_bytes=None if budget is None else byte_count(budget, key="--budget"),
        global_batch=global_batch,
        num_tokens=parse_count(tokens, option="--tokens"),
        price_per_gpu_hour=price,
        scales=scale,
        has_frontier=frontier,
        has_timeline=timeline,
    )
    found = answer(question)
    if save is not None:
        found.save(save)
    if as_json:
        print(json.dumps(as_data(found), indent=2))
    else:
        show(found)
    if not found.fits:
        # So that a script does not continue without a plan.
        raise Exit(1)
