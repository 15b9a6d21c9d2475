"""The options of `shardwise plan`, each declared once; those that several commands have are in shared_options.py."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.base.vocabulary.quantities import SIZE_EXAMPLE
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.systems import SYSTEMS

Model = Annotated[
    str | None,
    Argument(help="A catalogue name, hf:DIR, hf:Qwen/Qwen3-8B, timm:NAME, params:60b or python:FILE.py:function."),
]
ClusterName = Annotated[str | None, Option("--cluster", help="8xh100-80gb, 16x8xa100-40gb@ib-8x200, or a TOML file.")]
FabricSpeed = Annotated[
    float | None,
    Option("--fabric-gbps", min=0.1, help="Gb/s of each node's network, all ports together (default: of the cluster)."),
]

Lengths = Annotated[
    str | None,
    Option("--lengths", help="Tokens per sample where batches differ, in their order: 1024,512,768. Then they repeat."),
]

# The plan; what is not given is chosen

Strategy = Annotated[
    str | None, Option("--strategy", help=f"{', '.join(STRATEGIES)}, all (default), or auto (chosen for each unit).")
]
Goal = Annotated[str, Option("--goal", help="What to prefer: throughput, or a small memory peak (memory).")]
Budget = Annotated[
    str | None, Option("--budget", help=f"Memory to use per device, such as {SIZE_EXAMPLE} (default: all).")
]
HostMemory = Annotated[
    str | None,
    Option(
        "--host-memory",
        help=f"Host memory that a plan may use per node, such as {SIZE_EXAMPLE}; 0: none (default: what it needs).",
    ),
]
Offload = Annotated[
    str | None,
    Option(
        "--offload", help="Keep in host memory: states, activations, or both, with a comma (default: auto decides)."
    ),
]
MicroBatch = Annotated[
    int | None, Option("--micro-batch", help="Samples per rank per pass (default: the most that fit).")
]
GlobalBatch = Annotated[
    int | None,
    Option("--global-batch", min=1, help="Samples per step over all ranks; sets --accumulate or --micro-batch."),
]
Accumulate = Annotated[int, Option("--accumulate", min=1, help="Passes per optimizer step.")]
AccumulateReduced = Annotated[
    bool | None,
    Option(
        "--accumulate-reduced",
        help="Every pass reduces its gradients, as FSDP without no_sync (default: only if it fits no other way).",
    ),
]
Update = Annotated[
    str,
    Option(
        "--update",
        help="step; or backward: as gradients are averaged, without clipping, so that few exist at once; or auto.",
    ),
]
MeshShape = Annotated[str | None, Option("--mesh", help="REPLICATExSHARD, such as 8x8 (default: the best of a few).")]
Across = Annotated[
    str | None,
    Option(
        "--across", help="What is sharded over the mesh's replicate axis: ddp, zero1, zero2 (default: ddp and zero2)."
    ),
]
Recompute = Annotated[
    str | None,
    Option(
        "--recompute",
        help="none, selective, full; for some units: full,blocks.[0-8]=none (default: the fastest that fits).",
    ),
]
ReduceDtype = Annotated[
    str | None, Option("--reduce-dtype", help="What gradients are summed in: fp32 (default), bf16 or fp16.")
]
Tile = Annotated[
    list[str] | None,
    Option(
        "--tile", metavar="MODULES=TOKENS", help="Modules that compute in tiles, such as *.mlp=8192; may be repeated."
    ),
]
Compile = Annotated[str, Option("--compile", help="none, inductor, aot_eager, or auto (chosen with --strategy auto).")]
Capture = Annotated[
    str, Option("--capture", help="auto: a note says what units as CUDA graphs change; off: no CUDA graphs.")
]
Overlap = Annotated[
    str | None,
    Option(
        "--overlap", help="Communication during compute: all (default), gradients (not updated parameters), or none."
    ),
]
Loss = Annotated[
    str | None,
    Option(
        "--loss",
        help="Loss of a language model: lean, usual (fp32 logits; default with --engine torch and --like), kept "
        "(the loop holds them), chunked (fp32 by chunk) or fused (head and loss by chunk).",
    ),
]

# Engine, kernels and measured devices

PlannedEngine = Annotated[
    str | None, Option("--engine", help="shardwise (default), or torch's own DDP and fully_shard.")
]
Like = Annotated[
    str,
    Option(
        "--like",
        help=f"Predict another system as it is by default: {', '.join(SYSTEMS)}. Sets engine, strategy, reduction, "
        "overlap and loss; options that you give win.",
    ),
]
DeviceTable = Annotated[Path | None, Option("--devices", help="A device table that `shardwise calibrate` wrote.")]
Here = Annotated[
    bool,
    Option("--here", help="Measure this machine's CPU first (takes seconds); --cluster must describe this machine."),
]
SoftwarePreset = Annotated[
    str | None,
    Option("--software", help="Preset of the kernels: 2023, 2024 or current (default); the line below names them."),
]
Attention = Annotated[
    str | None,
    Option("--attention", help="Attention: cudnn (default), flash-3, flash-2, flash-1, memory-efficient or math."),
]
Matmul = Annotated[str | None, Option("--matmul", help="Library of matrix products: cuda-13 (default) or cuda-12.")]
Norms = Annotated[str | None, Option("--norms", help="RMS norms: fused (default), or operations.")]
MatmulPrecision = Annotated[
    str | None,
    Option("--matmul-precision", help="As torch.set_float32_matmul_precision: highest, or high for TF32."),
]

# What is shown

TokenCount = Annotated[
    str | None, Option("--tokens", help="Also show how long training on this many tokens takes, such as 1T.")
]
HourlyPrice = Annotated[float | None, Option("--price", help="Price per GPU-hour: shows what --tokens costs.")]
Frontier = Annotated[bool, Option("--frontier", help="Also show the best speed for every memory budget.")]
Scale = Annotated[bool, Option("--scale", help="Also show the best plan on 8 to 16,384 devices.")]
Timeline = Annotated[bool, Option("--timeline", help="Also show what each queue does in a step.")]
Serve = Annotated[bool, Option("--serve", help="Serve the planner page, on this machine only, and open it.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="Port for --serve (0: any free port).")]
Opens = Annotated[bool, Option("--browser/--no-browser", help="Open the page of --serve in the browser.")]
