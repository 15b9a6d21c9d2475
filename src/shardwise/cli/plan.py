"""`shardwise plan`: predicts memory and speed of every strategy on a cluster, and recommends one."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from shardwise.cli.plan_options import (
    OPTIMIZERS,
    SoftwareOptions,
    check_names,
    hybrid_mesh,
    parse_count,
    parse_host_memory,
    parse_mesh,
    parse_recompute,
    parse_tile,
    planned_cluster,
    source_of,
    system_settings,
)
from shardwise.cli.shared_options import AsJson, ImageSize, LoraRank, LoraTargets, Quantize, SampleLength
from shardwise.errors import InvalidPlan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.systems import SYSTEMS
from shardwise.spec.adaptation import adaptation_of
from shardwise.vocabulary.quantities import SIZE_EXAMPLE, byte_count


def plan(
    model: Annotated[
        str | None,
        Argument(help="A catalogue name, hf:DIR, hf:Qwen/Qwen3-8B, timm:NAME, params:60b or python:FILE.py:function."),
    ] = None,
    cluster: Annotated[str | None, Option(help="8xh100-80gb, 16x8xa100-40gb@ib-8x200, or a TOML file.")] = None,
    fabric_gbps: Annotated[
        float | None, Option(min=0.1, help="Gb/s of each node's network, all ports together (default: of the cluster).")
    ] = None,
    strategy: Annotated[
        str | None, Option(help=f"{', '.join(STRATEGIES)}, all (default), or auto (chosen for each unit).")
    ] = None,
    micro_batch: Annotated[int | None, Option(help="Samples per rank per pass (default: the most that fit).")] = None,
    seq: SampleLength = None,
    image: ImageSize = None,
    precision: Annotated[str, Option(help="fp32, bf16, fp16, fp8, or native (the dtypes of the model).")] = "bf16",
    recompute: Annotated[str, Option(help="none, full, selective; for some units: full,blocks.[0-8]=none.")] = "none",
    global_batch: Annotated[
        int | None, Option(min=1, help="Samples per step over all ranks; sets --accumulate or --micro-batch.")
    ] = None,
    accumulate: Annotated[int, Option(min=1, help="Passes per optimizer step.")] = 1,
    accumulate_reduced: Annotated[
        bool | None,
        Option(
            "--accumulate-reduced",
            help="Every pass reduces its gradients, as FSDP without no_sync (default: only if it fits no other way).",
        ),
    ] = None,
    update: Annotated[
        str, Option(help="step; or backward: as gradients are averaged, without clipping, so that few exist at once.")
    ] = "step",
    mesh: Annotated[str | None, Option(help="REPLICATExSHARD, such as 8x8 (default: the best of a few).")] = None,
    reduce_dtype: Annotated[
        str | None, Option(help="What gradients are summed in: fp32 (default), bf16 or fp16.")
    ] = None,
    budget: Annotated[
        str | None, Option(help=f"Memory to use per device, such as {SIZE_EXAMPLE} (default: all).")
    ] = None,
    host_memory: Annotated[
        str | None,
        Option(
            help=f"Host memory that a plan may use per node, such as {SIZE_EXAMPLE}; 0: none (default: what it needs)."
        ),
    ] = None,
    lora: LoraRank = None,
    lora_targets: LoraTargets = None,
    quantize: Quantize = None,
    optimizer: Annotated[str, Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    goal: Annotated[str, Option(help="What to prefer: throughput, or a small memory peak (memory).")] = "throughput",
    engine: Annotated[str | None, Option(help="shardwise (default), or torch's own DDP and fully_shard.")] = None,
    devices: Annotated[Path | None, Option(help="A device table that `shardwise calibrate` wrote.")] = None,
    software: Annotated[
        str | None, Option(help="Preset of the kernels: 2023, 2024 or current (default); the line below names them.")
    ] = None,
    attention: Annotated[
        str | None, Option(help="Attention: cudnn (default), flash-3, flash-2, flash-1, memory-efficient or math.")
    ] = None,
    matmul: Annotated[str | None, Option(help="Library of matrix products: cuda-13 (default) or cuda-12.")] = None,
    norms: Annotated[str | None, Option(help="RMS norms: fused (default), or operations.")] = None,
    matmul_precision: Annotated[
        str | None, Option(help="As torch.set_float32_matmul_precision: highest, or high for TF32.")
    ] = None,
    compile_with: Annotated[
        str, Option("--compile", help="none, inductor, aot_eager, or auto (chosen with --strategy auto).")
    ] = "none",
    capture: Annotated[
        str, Option(help="CUDA graphs of whole steps (on), of units (units), none (off), or auto (off, with a note).")
    ] = "auto",
    like: Annotated[
        str,
        Option(
            help=f"Predict another system as it is by default: {', '.join(SYSTEMS)}. Sets engine, strategy, reduction, "
            "overlap and loss; options that you give win."
        ),
    ] = "",
    overlap: Annotated[
        str | None,
        Option(help="Communication during compute: all (default), gradients (not updated parameters), or none."),
    ] = None,
    tile: Annotated[
        list[str] | None,
        Option(metavar="MODULES=TOKENS", help="Modules that compute in tiles, such as *.mlp=8192; may be repeated."),
    ] = None,
    loss: Annotated[
        str | None,
        Option(
            help="Loss of a language model: lean, usual (fp32 logits; default with --engine torch and --like), kept "
            "(the loop holds them), chunked (fp32 by chunk) or fused (head and loss by chunk)."
        ),
    ] = None,
    here: Annotated[
        bool,
        Option(
            "--here", help="Measure this machine's CPU first (takes seconds); --cluster must describe this machine."
        ),
    ] = False,
    tokens: Annotated[
        str | None, Option(help="Also show how long training on this many tokens takes, such as 1T.")
    ] = None,
    price: Annotated[float | None, Option(help="Price per GPU-hour: shows what --tokens costs.")] = None,
    frontier: Annotated[bool, Option("--frontier", help="Also show the best speed for every memory budget.")] = False,
    scale: Annotated[bool, Option("--scale", help="Also show the best plan on 8 to 16,384 devices.")] = False,
    timeline: Annotated[bool, Option("--timeline", help="Also show what each queue does in a step.")] = False,
    as_json: AsJson = False,
    save: Annotated[Path | None, Option(help="Write the recommended plan as PLAN.toml.")] = None,
    serve: Annotated[bool, Option("--serve", help="Serve the planner page, on this machine only.")] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Port for --serve (0: any free port).")] = 8765,
    page: Annotated[Path | None, Option(help="Write the planner page as one HTML file that needs no server.")] = None,
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

    kernels = SoftwareOptions(preset=software, attention=attention, matmul=matmul, norms=norms)
    where = planned_cluster(
        cluster,
        devices=devices,
        software=kernels,
        matmul_precision=matmul_precision,
        here=here,
        fabric_gbps=fabric_gbps,
    )
    way, ways = parse_recompute(recompute)
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
        precision=precision,
        reduce_dtype=chosen.reduce_dtype,
        recompute=way,
        recompute_overrides=ways,
        tile=chosen.tile,
        engine=chosen.engine,
        compile=compile_with,
        capture=capture,
    )
    question = PlanQuestion(
        source=source_of(
            model,
            seq=seq,
            image=image,
            loss=loss,
            chosen=chosen,
            adaptation=adaptation_of(lora, targets=lora_targets, quantize=quantize, precision=precision),
        ),
        plan=asked,
        strategy=chosen.strategy,
        cluster=where,
        optimizer=optimizer,
        goal=goal,
        system=chosen.system,
        like=chosen.text,
        budget_bytes=None if budget is None else byte_count(budget, key="--budget"),
        host_bytes=parse_host_memory(host_memory),
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
