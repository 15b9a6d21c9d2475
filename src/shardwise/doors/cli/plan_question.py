"""The question that the options of `shardwise plan` ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.base.vocabulary.quantities import byte_count
from shardwise.doors.cli.plan_options import (
    PlanOptions,
    check_names,
    hybrid_mesh,
    parse_count,
    parse_host_memory,
    parse_mesh,
    parse_offload,
    parse_recompute,
    parse_tile,
)
from shardwise.doors.cli.terminal import status_line
from shardwise.models.specs.spec_request import adaptation_of
from shardwise.plan.limits import LIMITS, EngineLimits
from shardwise.plan.placement import ACROSS
from shardwise.planner.systems import System, system_of
from shardwise.program.spec.losses import LEAN, LOSSES, USUAL

if TYPE_CHECKING:
    from shardwise.doors.cli.plan_answer import PlanQuestion, WayOut
    from shardwise.hardware import Cluster
    from shardwise.models.reference import Model

PAGE_MODEL, PAGE_CLUSTER = "llama-3.1-8b", "8xh100-80gb"
"""What the planner page opens with, where nothing is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings:
    """The options that `--like` sets, each as it was given or as the system has it; `text` names them."""

    system: System
    engine: str
    strategy: str
    reduce_dtype: str
    accumulate_reduced: bool
    loss: str
    tile: Mapping[str, int]

    @property
    def text(self) -> str:
        if not self.system.name:
            return ""
        passes = "in every pass" if self.accumulate_reduced else "once per step"
        return (
            f"Like {self.system.name} ({self.system.title}): --engine {self.engine} --strategy {self.strategy} "
            f"--overlap {self.system.overlap} --loss {self.loss} --reduce-dtype {self.reduce_dtype}{self._memory}, "
            f"gradients reduced {passes}. Source: {self.system.source}."
        )

    @property
    def _memory(self) -> str:
        tiles = "".join(f" --tile {pattern}={tokens}" for pattern, tokens in self.tile.items())
        return f"{tiles}, expandable segments" if self.system.is_expandable else tiles


def settings_of(options: PlanOptions) -> SystemSettings:
    """Return the settings of `--like`, or the defaults; what the options say wins."""
    system = system_of(options.like.strip().lower())
    system = replace(system, overlap=options.overlap or system.overlap)
    engine, precision = options.engine or system.engine, options.precision
    as_computed = system.reduces_as_computed and precision in ("bf16", "fp16")
    reduced = options.accumulate_reduced
    # The plan refuses an engine that does not exist.
    limits = LIMITS.get(engine, EngineLimits(name=engine))
    if options.loss is not None and options.loss not in LOSSES:
        raise UnknownName.of("loss", options.loss, known=LOSSES)
    return SystemSettings(
        system=system,
        engine=engine,
        strategy=options.strategy or ",".join(system.strategies) or "all",
        reduce_dtype=options.reduce_dtype or (precision if as_computed else "fp32"),
        accumulate_reduced=system.accumulate_reduced if reduced is None else reduced,
        loss=options.loss or (system.loss if system.name else LEAN if limits.has_lean_loss else USUAL),
        tile=parse_tile(options.tile),
    )


def cluster_for(options: PlanOptions) -> "Cluster":
    from shardwise.hardware import cluster_of
    from shardwise.hardware.cluster import plain_fabric, read_cluster_file
    from shardwise.hardware.device import chosen_software
    from shardwise.hardware.host_here import probed_cluster

    cluster, gbps = cluster_of(options.cluster), options.fabric_gbps
    if options.devices is not None:
        measured = read_cluster_file(options.devices)
        cluster = replace(cluster, device=measured.device, link=measured.link or cluster.link)
    software = chosen_software(
        cluster.device.software,
        preset=options.software,
        attention=options.attention,
        matmul=options.matmul,
        norms=options.norms,
    )
    matmul_precision = options.matmul_precision or cluster.device.matmul_precision
    device = replace(cluster.device, software=software, matmul_precision=matmul_precision)
    host_bytes = parse_host_memory(options.host_memory, option="--host-memory")
    cluster = replace(cluster, device=device, host_bytes=cluster.host_bytes if host_bytes is None else host_bytes)
    if gbps is not None:
        if cluster.num_nodes == 1:
            raise InvalidPlan(f"--fabric-gbps {gbps:g}: {cluster} is one node; say how many: 2x{cluster}")
        cluster = replace(cluster, fabric=plain_fabric(gbps), assumes_fabric=False)
    return probed_cluster(cluster) if options.here else cluster


def model_for(options: PlanOptions) -> "Model":
    """Return the model with the chosen loss; only catalogue models have the lean one."""
    from shardwise.models.reference import Model

    lengths = _lengths(options)
    named = Model(
        options.model,
        seq=max(lengths, default=options.seq),
        lengths=lengths,
        image=options.image,
        loss=settings_of(options).loss,
        adaptation=adaptation_of(
            options.lora, targets=options.lora_targets, quantize=options.quantize, precision=options.precision
        ),
        while_tracing=lambda name: status_line(f"Tracing {name} …"),
    )
    if options.loss == LEAN and not named.has_lean_loss:
        raise InvalidPlan(
            f"--loss {LEAN}: {options.model} has a loss of its own; only catalogue models of tokens have this one"
        )
    return named


def _lengths(options: PlanOptions) -> tuple[int, ...]:
    text = options.lengths or ""
    try:
        found = tuple(int(word) for word in text.split(",") if text)
    except ValueError:
        found = (0,)
    if min(found, default=1) < 1:
        raise InvalidPlan(f"--lengths {text}: say the tokens per sample of each batch, as 1024,512,768")
    if found and options.seq not in (None, max(found)):
        raise InvalidPlan(f"--lengths {text} with --seq {options.seq}: the longest is the sample that is planned")
    return found


def _ways_out(question: "PlanQuestion") -> "list[WayOut]":
    """Look for ways out; only an answer in which nothing fits imports the search for them."""
    from shardwise.doors.cli.ways_out import ways_out

    return ways_out(question)


def question_of(
    options: PlanOptions,
    *,
    cluster_of: Callable[[PlanOptions], "Cluster"] = cluster_for,
    named: Callable[[PlanOptions], "Model"] = model_for,
) -> "PlanQuestion":
    """Return the question that the options ask; a caller with many questions keeps the clusters and the models."""
    from shardwise.doors.cli.plan_answer import PlanQuestion
    from shardwise.plan import Plan
    from shardwise.planner.search.request import RECOMPUTES

    check_names(goal=options.goal, optimizer=options.optimizer)
    where, chosen, model = cluster_of(options), settings_of(options), named(options)
    plan = Plan(
        micro_batch=options.micro_batch,
        accumulate=options.accumulate,
        accumulate_reduced=chosen.accumulate_reduced,
        update=options.update,
        mesh=parse_mesh(options.mesh) or hybrid_mesh(chosen.strategy, cluster=where),
        across=options.across or ACROSS[0],
        units=options.units,
        precision=options.precision,
        reduce_dtype=chosen.reduce_dtype,
        piece_bytes=0 if chosen.system.is_foreign else None,
        tile=chosen.tile,
        engine=chosen.engine,
        compile=options.compile,
        capture=options.capture,
        **parse_recompute(options.recompute or "none"),
        **parse_offload(options.offload),
    )
    return PlanQuestion(
        options=options,
        ask=partial(question_of, cluster_of=cluster_of, named=named),
        find_ways=_ways_out,
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
        # Another system recomputes nothing unless it is told to.
        row_recomputes=RECOMPUTES if options.recompute is None and not chosen.system.name else (),
        num_tokens=parse_count(options.tokens, option="--tokens"),
        price_per_gpu_hour=options.price,
        scales=options.scale,
        has_frontier=options.frontier,
        has_timeline=options.timeline,
    )
