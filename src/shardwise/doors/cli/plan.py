"""`shardwise plan`: predicts memory and speed of every strategy on a cluster, and recommends one."""

import json

from typer import Exit

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.collection import without_collection
from shardwise.doors.cli import plan_flags as flags
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_question import PAGE_CLUSTER, PAGE_MODEL, question_of
from shardwise.doors.cli.shared_options import (
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
from shardwise.plan.patterns import AUTO_UNITS


def plan(
    model: flags.Model = None,
    cluster: flags.ClusterName = None,
    fabric_gbps: flags.FabricSpeed = None,
    strategy: flags.Strategy = None,
    micro_batch: flags.MicroBatch = None,
    seq: SampleLength = None,
    lengths: flags.Lengths = None,
    image: ImageSize = None,
    precision: Precision = "bf16",
    recompute: flags.Recompute = None,
    global_batch: flags.GlobalBatch = None,
    accumulate: flags.Accumulate = 1,
    accumulate_reduced: flags.AccumulateReduced = None,
    update: flags.Update = "step",
    mesh: flags.MeshShape = None,
    across: flags.Across = None,
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
    opens: flags.Opens = True,
) -> None:
    """Predict memory and speed of every strategy, and recommend one."""
    if serve:
        model, cluster = model or PAGE_MODEL, cluster or PAGE_CLUSTER
    if model is None or cluster is None:
        raise InvalidPlan(
            "plan needs a model and a cluster: shardwise plan llama-3.1-8b --cluster 8xh100-80gb; or a page on which "
            "both are chosen: shardwise plan --serve"
        )
    options = PlanOptions(
        model=model, cluster=cluster, fabric_gbps=fabric_gbps, strategy=strategy, micro_batch=micro_batch, seq=seq,
        lengths=lengths, image=image, precision=precision, recompute=recompute, global_batch=global_batch,
        accumulate=accumulate, accumulate_reduced=accumulate_reduced, update=update, mesh=mesh, across=across,
        units=units, reduce_dtype=reduce_dtype, budget=budget, host_memory=host_memory, offload=offload, lora=lora,
        lora_targets=lora_targets, quantize=quantize, optimizer=optimizer, goal=goal, engine=engine, devices=devices,
        software=software, attention=attention, matmul=matmul, norms=norms, matmul_precision=matmul_precision,
        compile=compile_with, capture=capture, like=like, overlap=overlap, tile=tuple(tile or ()), loss=loss,
        here=here, tokens=tokens, price=price, frontier=frontier, scale=scale, timeline=timeline,
    )  # fmt: skip
    if serve:
        from shardwise.doors.cli.plan_page import serve_page

        if as_json or save is not None:
            raise InvalidPlan("--serve: the page saves plans and answers itself; --json and --save are without it")
        serve_page(options, port=port, opens=opens)
        return
    from shardwise.doors.cli.plan_answer import answer
    from shardwise.doors.cli.plan_output import as_data, show

    # A short process: looking for garbage would take a tenth of its time.
    with without_collection():
        found = answer(question_of(options))
    if save is not None:
        found.save(save)
    if as_json:
        print(json.dumps(as_data(found), indent=2))
    else:
        show(found)
    if not found.fits:
        # So that a script does not continue without a plan.
        raise Exit(1)
