"""The options of `shardwise plan` as one value, the question that they ask, and the command that gives them."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.plan_options import (
    SoftwareOptions,
    SystemSettings,
    check_names,
    hybrid_mesh,
    model_of,
    parse_count,
    parse_host_memory,
    parse_mesh,
    parse_offload,
    parse_recompute,
    parse_tile,
    planned_cluster,
    system_settings,
)
from shardwise.models.adaptation import adaptation_of
from shardwise.plan.policy import AUTO_UNITS
from shardwise.vocabulary.quantities import byte_count

if TYPE_CHECKING:
    from shardwise.cli.plan_answer import PlanQuestion
    from shardwise.hardware import Cluster
    from shardwise.models.reference import Model

PAGE_MODEL, PAGE_CLUSTER = "llama-3.1-8b", "8xh100-80gb"
"""What the planner page opens with, where nothing is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that say what is planned, as they are typed; `plan_flags.py` describes them."""

    model: str
    cluster: str
    fabric_gbps: float | None = None
    strategy: str | None = None
    micro_batch: int | None = None
    seq: int | None = None
    image: int | None = None
    precision: str = "bf16"
    recompute: str = "none"
    global_batch: int | None = None
    accumulate: int = 1
    accumulate_reduced: bool | None = None
    update: str = "step"
    mesh: str | None = None
    units: str = AUTO_UNITS
    reduce_dtype: str | None = None
    budget: str | None = None
    host_memory: str | None = None
    offload: str | None = None
    lora: int | None = None
    lora_targets: str | None = None
    quantize: str | None = None
    optimizer: str = "adamw"
    goal: str = "throughput"
    engine: str | None = None
    devices: Path | None = None
    software: str | None = None
    attention: str | None = None
    matmul: str | None = None
    norms: str | None = None
    matmul_precision: str | None = None
    compile: str = "none"
    capture: str = "auto"
    like: str = ""
    overlap: str | None = None
    tile: tuple[str, ...] = ()
    loss: str | None = None
    here: bool = False
    tokens: str | None = None
    price: float | None = None
    frontier: bool = False
    scale: bool = False
    timeline: bool = False

    @property
    def command(self) -> str:
        """The command with these options; those that have their default are left out."""
        words = ["shardwise", "plan", self.model]
        for field in fields(self):
            value, name = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "model" or value is None or value == field.default:
                continue
            if isinstance(value, bool):
                words += [name] if value else []
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    words += [name, str(one)]
        return shlex.join(words)


def settings_of(options: PlanOptions) -> SystemSettings:
    """Return what `--like` sets, or the defaults; what the options say wins."""
    return system_settings(
        options.like,
        model=options.model,
        engine=options.engine,
        strategy=options.strategy,
        precision=options.precision,
        reduce_dtype=options.reduce_dtype,
        accumulate_reduced=options.accumulate_reduced,
        overlap=options.overlap,
        loss=options.loss,
        tile=parse_tile(list(options.tile)),
    )


def cluster_for(options: PlanOptions) -> "Cluster":
    return planned_cluster(
        options.cluster,
        devices=options.devices,
        software=SoftwareOptions(
            preset=options.software, attention=options.attention, matmul=options.matmul, norms=options.norms
        ),
        matmul_precision=options.matmul_precision,
        here=options.here,
        fabric_gbps=options.fabric_gbps,
        host_bytes=parse_host_memory(options.host_memory, option="--host-memory"),
    )


def model_for(options: PlanOptions) -> "Model":
    adaptation = adaptation_of(
        options.lora, targets=options.lora_targets, quantize=options.quantize, precision=options.precision
    )
    return model_of(
        options.model,
        seq=options.seq,
        image=options.image,
        loss=options.loss,
        chosen=settings_of(options),
        adaptation=adaptation,
    )


def question_of(
    options: PlanOptions,
    *,
    cluster_of: Callable[[PlanOptions], "Cluster"] = cluster_for,
    named: Callable[[PlanOptions], "Model"] = model_for,
) -> "PlanQuestion":
    """Return the question that the options ask; a caller with many questions keeps the clusters and the models."""
    from shardwise.cli.plan_answer import PlanQuestion
    from shardwise.plan import Plan

    check_names(goal=options.goal, optimizer=options.optimizer)
    where, chosen, model = cluster_of(options), settings_of(options), named(options)
    plan = Plan(
        micro_batch=options.micro_batch,
        accumulate=options.accumulate,
        accumulate_reduced=chosen.accumulate_reduced,
        update=options.update,
        mesh=parse_mesh(options.mesh) or hybrid_mesh(chosen.strategy, cluster=where),
        units=options.units,
        precision=options.precision,
        reduce_dtype=chosen.reduce_dtype,
        piece_bytes=0 if chosen.system.is_foreign else None,
        tile=chosen.tile,
        engine=chosen.engine,
        compile=options.compile,
        capture=options.capture,
        **parse_recompute(options.recompute),
        **parse_offload(options.offload),
    )
    return PlanQuestion(
        model=model,
        spec_for=model.spec_for,
        plan=plan,
        strategy=chosen.strategy,
        cluster=where,
        optimizer=options.optimizer,
        goal=options.goal,
        system=chosen.system,
        like=chosen.text,
        budget_bytes=None if options.budget is None else byte_count(options.budget, key="--budget"),
        global_batch=options.global_batch,
        num_tokens=parse_count(options.tokens, option="--tokens"),
        price_per_gpu_hour=options.price,
        scales=options.scale,
        has_frontier=options.frontier,
        has_timeline=options.timeline,
    )
